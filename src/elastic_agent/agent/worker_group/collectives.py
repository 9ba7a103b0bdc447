"""Asks the workers how far they are in their collectives, over datagrams; nothing here waits.

A worker introduces itself when it makes its first process group (`integrations/collectives`); then it is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

import msgspec
from msgspec import Meta

from elastic_agent.diagnosis.records import Collective, GroupProgress
from elastic_agent.logs import get_logger

SUMMARY, DETAILS = b"summary", b"details"
LARGEST_MESSAGE = 256 * 1024
_CREDENTIALS = struct.Struct("3i")
_MOST_GROUPS = 64


class _Call(msgspec.Struct):
    serial: Annotated[int, Meta(ge=0, le=2**53)]
    name: Annotated[str, Meta(max_length=256)]
    size_bytes: Annotated[int, Meta(ge=0, le=2**60)]


class _Group(msgspec.Struct):
    group: Annotated[str, Meta(max_length=256)]
    enqueued: Annotated[int, Meta(ge=-1, le=2**53)]
    started: Annotated[int, Meta(ge=-1, le=2**53)]
    completed: Annotated[int, Meta(ge=-1, le=2**53)]
    recent: tuple[_Call, ...] = ()
    ranks: tuple[Annotated[int, Meta(ge=0, le=2**53)], ...] = ()
    timeout_s: float = 0.0


class _Answer(msgspec.Struct):
    slot: Annotated[int, Meta(ge=0)]
    generation: int
    pid: int
    groups: Annotated[tuple[_Group, ...], Meta(max_length=4096)] | None = None
    """None: the worker introduces itself."""
    details: bool = False
    line: Annotated[str, Meta(max_length=512)] = ""
    waits_in: Annotated[str, Meta(max_length=256)] = ""
    stack: Annotated[str, Meta(max_length=4096)] = ""


_DECODER = msgspec.json.Decoder(_Answer)


@dataclass(frozen=True)
class WorkerCollectives:
    """What a worker has answered."""

    pid: int
    groups: tuple[GroupProgress, ...] = ()
    line: str = ""
    waits_in: str = ""
    stack: str = ""
    timeout_s: float = 0.0
    """The shortest time-out of the collectives that it waits in; 0: not known."""
    since_s: float = 0.0
    """When it was first known to be where it is, by the loop's clock."""
    asked: int = 0
    """How many questions it has been asked since its last answer."""

    @property
    def position(self) -> tuple[tuple[str, int, int, int], ...]:
        """What changes with every step of training."""
        return tuple((one.group, one.enqueued, one.started, one.completed) for one in self.groups)


@dataclass
class Collectives:
    """What the workers of the present generation have answered. To be opened and closed in the agent's loop."""

    answered: Callable[[], None] = lambda: None
    """Called after an answer with details."""
    address: str | None = None
    """Where workers introduce themselves; None while it is closed."""
    _socket: socket.socket | None = None
    _generation: int = 0
    _peers: dict[int, bytes] = field(default_factory=dict)
    """Where each slot is asked."""
    _workers: dict[int, WorkerCollectives] = field(default_factory=dict)

    def open(self) -> None:
        """Listen. Without a socket, nothing is known of the workers' collectives."""
        address = f"elastic-agent-progress/{os.getuid()}/{os.getpid()}-{secrets.token_hex(8)}"
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            opened.bind("\0" + address)
        except OSError as error:
            opened.close()
            get_logger().debug("cannot ask workers for their progress", reason=str(error))
            return
        self._socket, self.address = opened, address
        asyncio.get_running_loop().add_reader(opened.fileno(), self._readable)

    def close(self) -> None:
        """Stop listening."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = self.address = None

    def begin(self, generation: int) -> None:
        """Forget the workers of earlier generations, once; those of this one may have introduced themselves."""
        if generation != self._generation:
            self._generation = generation
            self._peers.clear()
            self._workers.clear()

    @property
    def workers(self) -> Mapping[int, WorkerCollectives]:
        """By slot: those that have made a process group."""
        return self._workers

    def ask(self, *, details: bool) -> None:
        """Ask all workers; what they answer is found in :attr:`workers` soon."""
        if self._socket is None:
            return
        for slot, peer in self._peers.items():
            # One that does not read for long has a full queue.
            with contextlib.suppress(OSError):
                self._socket.sendto(DETAILS if details else SUMMARY, peer)
            self._workers[slot] = replace(self._workers[slot], asked=self._workers[slot].asked + 1)

    def _readable(self) -> None:
        assert self._socket is not None
        while True:
            try:
                data, ancillary, _, peer = self._socket.recvmsg(LARGEST_MESSAGE, socket.CMSG_SPACE(12))
            except BlockingIOError:
                return
            except OSError:
                continue
            if _is_own(ancillary) and isinstance(peer, bytes) and peer:
                with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                    self._take_in(_DECODER.decode(data), peer)

    def _take_in(self, answer: _Answer, peer: bytes) -> None:
        if answer.generation < self._generation:
            return
        self.begin(answer.generation)
        known = self._workers.get(answer.slot)
        now_s = asyncio.get_running_loop().time()
        if answer.groups is None:
            self._peers[answer.slot] = peer
            self._workers[answer.slot] = WorkerCollectives(answer.pid, since_s=now_s)
        elif known is not None and self._peers[answer.slot] == peer:
            self._workers[answer.slot] = _updated(known, answer, now_s)
            if answer.details:
                self.answered()


def _updated(known: WorkerCollectives, answer: _Answer, now_s: float) -> WorkerCollectives:
    groups = tuple(_progress(one, answer.line) for one in (answer.groups or ())[:_MOST_GROUPS])
    fresh = WorkerCollectives(answer.pid, groups, answer.line, answer.waits_in, answer.stack)
    waits = [one for one in answer.groups or () if one.enqueued > max(one.completed, 0)]
    timeouts = [one.timeout_s for one in waits if one.timeout_s > 0]
    fresh = replace(fresh, timeout_s=min(timeouts, default=0.0), since_s=now_s)
    if fresh.position != known.position:
        return fresh
    if not answer.details:  # what is known in detail holds as long as it stays where it is
        return replace(known, asked=0)
    return replace(fresh, since_s=known.since_s)


def _progress(one: _Group, line: str) -> GroupProgress:
    recent = tuple(Collective(call.serial, call.name, call.size_bytes) for call in one.recent)
    last = next((call for call in recent if call.serial == one.enqueued), None)
    if last is not None and one.enqueued > max(one.completed, 0):
        last = msgspec.structs.replace(last, line=line)
    return GroupProgress(one.group, one.enqueued, one.started, one.completed, last, one.ranks, recent)


def _is_own(ancillary: list[tuple[int, int, bytes]]) -> bool:
    """Whether a process of this user, or of root, has sent it."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(data) >= _CREDENTIALS.size:
            return _CREDENTIALS.unpack(data[: _CREDENTIALS.size])[1] in (os.geteuid(), 0)
    return False
