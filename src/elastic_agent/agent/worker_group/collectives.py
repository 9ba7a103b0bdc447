"""Asks the workers how far they are in their collectives, over datagrams; nothing here waits.

A worker introduces itself when it makes its first process group (`integrations/collectives`); then it is asked. One
that takes optimizer steps without a group says so (`integrations/optimizer_steps.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Callable, Mapping, Set
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from elastic_agent.diagnosis.records import GroupProgress, Place
from elastic_agent.logs import get_logger
from elastic_agent.printable import plain

from .parking import Parking

LARGEST_MESSAGE = 256 * 1024

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the sender of a datagram, from the kernel."""

SUMMARY, DETAILS, STACKS = b"summary", b"details", b"stacks"
_MOST_GROUPS = 64

LAST_OF_GROUP = 4
"""So many collectives of each group are known of a worker whose script was ended by an exception."""

SAMPLES = 60
"""From how many of the last answers the part of the time in which a worker waits is computed."""

LEAST_SAMPLES = 12

SAME_PLACE_S = 8.0
"""After so long at the same place nothing progresses: what a worker does then is no measure of its speed."""


class _Group(GroupProgress, frozen=True):
    timeout_s: float = 0.0


class _Answer(Place, frozen=True):
    slot: Annotated[int, Meta(ge=0)]
    generation: int
    pid: int
    groups: Annotated[tuple[_Group, ...], Meta(max_length=4096)] | None = None
    """None: the worker introduces itself."""
    trains_alone: bool = False
    """It takes optimizer steps, and has no process group."""
    meeting_file: Annotated[str, Meta(max_length=4096)] = ""
    """Over which the ranks of a process group that it makes meet."""
    stacks: Annotated[str, Meta(max_length=65_536)] | None = None
    """Of all its threads."""
    details: bool = False
    is_last: bool = False
    """An exception ends the worker's script."""
    parking: Annotated[str, Meta(max_length=64)] = ""
    """The word that it says about parking; empty: nothing."""


_DECODER = msgspec.json.Decoder(_Answer)


class WorkerCollectives(Place, frozen=True):
    """The last answer of a worker."""

    pid: int
    groups: tuple[GroupProgress, ...] = ()
    timeout_s: float = 0.0
    """The shortest time-out of the collectives that it waits in; 0: not known."""
    since_s: float = 0.0
    """When it was first known to be where it is, by the loop's clock."""
    asked: int = 0
    """The number of questions that it has been asked since its last answer."""
    is_last: bool = False
    """It sent this when an exception ended its script, or when it was asked because another worker had ended."""
    samples: tuple[bool, ...] = ()
    """Of its last answers while there was progress: whether it waited in a collective."""

    @property
    def is_silent(self) -> bool:
        """True if it has not answered for a while."""
        return self.asked > 1

    @property
    def waits(self) -> float | None:
        """The part of the time in which it waited in a collective; None: not known yet."""
        return sum(self.samples) / len(self.samples) if len(self.samples) >= LEAST_SAMPLES else None

    @property
    def position(self) -> tuple[tuple[str, int, int, int], ...]:
        """The counts that change with every step of training."""
        return tuple((group.group, group.enqueued, group.started, group.completed) for group in self.groups)


class Collectives:
    """The answers of the workers of the present generation. To be opened and closed in the agent's loop."""

    def __init__(self, report_alone: Callable[[Set[int]], None] = lambda _: None) -> None:
        """Listen to nothing yet.

        Args:
            report_alone: takes the slots of the workers that train alone, while none has made a process group.
        """
        self._report_alone = report_alone
        self._alone: set[int] = set()
        self.meeting_files: set[str] = set()
        """Files over which the workers of this generation meet, instead of the agents' store."""
        self._stacks: dict[int, str] = {}
        self._socket: socket.socket | None = None
        self.address: str | None = None
        """Where workers introduce themselves, in the abstract namespace of Unix sockets; None while it is closed."""
        self._generation = 0
        self._peers: dict[int, bytes] = {}
        """Where each slot is asked."""
        self._workers: dict[int, WorkerCollectives] = {}
        self._is_ending = False
        self.parking = Parking(self._send_to)
        """The words that they say about parking."""

    def open(self) -> None:
        """Listen. Without a socket, which is logged, nothing is known of the workers' collectives."""
        address = f"elastic-agent-progress/{os.getuid()}/{os.getpid()}-{secrets.token_hex(8)}"
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            opened.bind("\0" + address)
        except OSError as error:
            opened.close()
            get_logger().debug("workers cannot report their progress to the agent", reason=str(error))
            return
        self._socket, self.address = opened, address
        asyncio.get_running_loop().add_reader(opened.fileno(), self._readable)

    def close(self) -> None:
        """Stop listening."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = self.address = None

    def begin(self, generation: int, *, anew: bool = False) -> None:
        """Forget the workers of earlier generations, once; those of this one may have introduced themselves.

        ``anew``: none has, and those that were said to be of this one are gone.
        """
        if anew or generation != self._generation:
            self._generation = generation
            self._peers.clear()
            self._workers.clear()
            self._alone.clear()
            self.meeting_files.clear()
            self.parking.clear()
            self._is_ending = False

    @property
    def workers(self) -> Mapping[int, WorkerCollectives]:
        """By slot: those that have made a process group."""
        return self._workers

    def last_of(self, slot: int, pid: int) -> tuple[GroupProgress, ...]:
        """Return the last collectives of a worker when its script or another worker ended; empty: not known."""
        known = self._workers.get(slot)
        if known is None or known.pid != pid or not known.is_last:
            return ()
        return tuple(replace(group, recent=group.recent[-LAST_OF_GROUP:]) for group in known.groups)

    def ask(self, *, details: bool) -> None:
        """Ask all workers; what they answer is found in :attr:`workers` soon."""
        self._send(DETAILS if details else SUMMARY)
        for slot in self._peers:
            self._workers[slot] = replace(self._workers[slot], asked=self._workers[slot].asked + 1)

    def ask_stacks(self) -> Mapping[int, str]:
        """Ask the workers for their stacks; what they answer appears in the mapping, by slot."""
        self._stacks = {}
        self._send(STACKS)
        return self._stacks

    def _send(self, question: bytes) -> None:
        """Ask all workers, but for those that are gone, or have not read what they were asked before."""
        for peer in self._peers.values():
            self._send_to(question, peer)

    def _send_to(self, message: bytes, peer: bytes) -> bool:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto(message, peer)
                return True
        return False

    def ask_at_the_end(self) -> None:
        """Ask the remaining workers for their last collectives, which may show why the generation ends."""
        self._is_ending = True
        self.ask(details=True)

    def _readable(self) -> None:
        while self._socket is not None:
            try:
                data, ancillary, _, peer = self._socket.recvmsg(LARGEST_MESSAGE, socket.CMSG_SPACE(12))
            except BlockingIOError:
                return
            except OSError:
                continue
            if isinstance(peer, bytes) and peer and _is_own(ancillary):
                with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    self._take_in(_DECODER.decode(data), peer)

    def _take_in(self, answer: _Answer, peer: bytes) -> None:
        if answer.generation < self._generation:
            return
        self.begin(answer.generation)
        known = self._workers.get(answer.slot)
        now_s = asyncio.get_running_loop().time()
        if answer.parking:
            self.parking.take_in(answer.slot, answer.parking, peer)
        elif answer.trains_alone:
            self._alone.add(answer.slot)
            if not self._workers:
                self._report_alone(self._alone)
        elif answer.meeting_file:
            self.meeting_files.add(answer.meeting_file)
        elif answer.stacks is not None:
            self._stacks[answer.slot] = answer.stacks
        elif answer.groups is None:
            self._peers[answer.slot] = peer
            self._workers[answer.slot] = WorkerCollectives(answer.pid, since_s=now_s)
        elif known is not None and self._peers[answer.slot] == peer:
            is_last = answer.is_last or (self._is_ending and answer.details)
            self._workers[answer.slot] = _updated(known, replace(answer, is_last=is_last), now_s)


def _is_own(ancillary: list[tuple[int, int, bytes]]) -> bool:
    """Return whether a process of this user, or of root, has sent the datagram."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(data) >= _CREDENTIALS.size:
            return _CREDENTIALS.unpack(data[: _CREDENTIALS.size])[1] in (os.geteuid(), 0)
    return False


def _updated(known: WorkerCollectives, answer: _Answer, now_s: float) -> WorkerCollectives:
    if known.is_last:  # an answer that follows may be of a thread that reports the exception
        return known
    groups = answer.groups or ()
    waits = [group for group in groups if group.is_waiting]
    samples = known.samples
    if not answer.details and now_s - known.since_s <= SAME_PLACE_S:
        samples = (*samples, bool(waits))[-SAMPLES:]
    fresh = WorkerCollectives(
        answer.pid,
        tuple(_progress(group, answer) for group in groups[:_MOST_GROUPS]),
        min((group.timeout_s for group in waits if group.timeout_s > 0), default=0.0),
        since_s=now_s,
        is_last=answer.is_last,
        samples=samples,
        **{**answer.as_place(), "handles": plain(answer.handles), "raised_at": plain(answer.raised_at)},
    )
    if answer.is_last or fresh.position != known.position:
        return fresh
    if not answer.details:  # what is known in detail holds as long as it stays where it is
        return replace(known, asked=0, samples=samples)
    return replace(fresh, since_s=known.since_s)


def _progress(group: _Group, answer: _Answer) -> GroupProgress:
    last = next((call for call in group.recent if call.serial == group.enqueued), None)
    # gloo counts a collective that failed as completed.
    is_where_it_is = (answer.is_last and answer.waits_in != "") or group.is_waiting
    if last is not None and is_where_it_is:
        last = replace(last, line=answer.line)
    return GroupProgress(
        group.group, group.enqueued, group.started, group.completed, last, group.ranks, group.recent
    )
