"""Decides which connections to a guarded bootstrap store from other machines are admitted.

Each node's agent keeps a channel to the relay in front of the store (:mod:`.responder`). Over it, the relay asks for
the owner of a connection from that machine (:mod:`.identification`); those of the agent's own user are admitted.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import math
import resource
import selectors
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from elastic_agent.logs import get_logger
from elastic_agent.transport.addresses import set_up_for_messages
from elastic_agent.transport.peers import check_connected
from elastic_agent.transport.sealing import Seal

from .identification import HELLO, Answer, Ends, IdentificationError, Question, RelayEnd

HOLD_S = 10.0
"""How long an undecided connection is kept."""

MOST_STRANGERS = 2048
"""Undecided connections from all machines without an agent of the run; an agent's own is one until it has proved
itself."""

MOST_OF_A_MEMBER = 1024
"""Undecided connections from one machine with an agent of the run."""

QUESTIONS_TO_ALL_PER_S = 2000.0
"""How many questions about strangers are asked on average over ``HOLD_S``: each takes some 30 µs."""

MOST_UNSENT_BYTES = 1 << 16
"""Questions that wait for an agent which does not read them."""

MOST_REPORTED = 100
"""Messages about connections that were refused: at most one for each machine."""

_CHUNK_BYTES = 1 << 14


@dataclass(eq=False)
class _Newcomer:
    """A connection that is not decided yet."""

    sock: socket.socket
    host: str
    ends: Ends
    is_own: bool
    """Whether it belongs to a process of this user on this machine: then it is the store's, or a channel."""
    until_s: float
    crowd: _Crowd
    is_worker: bool = False
    """Whether it has sent what a client of the store sends."""
    asked: dict[_Channel, int] = field(default_factory=dict)
    """Agents that have not answered yet, with the number of the question."""


@dataclass(eq=False)
class _Channel:
    """An agent's channel."""

    sock: socket.socket
    host: str
    end: RelayEnd
    until_s: float
    """When it is closed, if the agent has not proved by then that it has the secret."""
    crowd: _Crowd
    unsent: bytearray = field(default_factory=bytearray)
    asked: dict[int, _Newcomer] = field(default_factory=dict)
    """By the number of the question."""


_Crowd = dict[_Newcomer | _Channel, None]
"""Undecided connections that have to share a limit, in the order in which they came."""


class RemoteAdmission:
    """The undecided connections of one relay, and the channels of its agents. Used by the relay's thread alone."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        seal: Seal,
        shown: str,
        admit: Callable[[socket.socket], None],
    ) -> None:
        """Prepare.

        Args:
            selector: of the relay's thread, which calls what is registered with it, without arguments.
            seal: of all agents of the run.
            shown: the store and its port, as the log names them.
            admit: takes a connection over.
        """
        self._selector = selector
        self._seal = seal
        self._shown = shown
        self._admit = admit
        self._undecided: dict[_Newcomer, None] = {}
        """In the order in which they came."""
        self._unproven: dict[_Channel, None] = {}
        """Channels whose agents have not proved yet that they have the secret, in the order in which they came."""
        self._channels: dict[str, dict[_Channel, None]] = {}
        """All others, by the address from which they come."""
        self._strangers: _Crowd = {}
        self._of_members: dict[str, _Crowd] = {}
        self._numbers = itertools.count(1)
        self._quiet_from_s = -math.inf
        """When the questions to all agents would be over if they were asked at the permitted rate."""
        self._reported: set[str] = set()

    def arrived(self, sock: socket.socket, *, is_own: bool) -> None:
        """Decide about a connection. ``is_own``: it belongs to a process of this user on this machine.

        Raises:
            OSError: the connection is gone.
        """
        ends = Ends(_end(sock.getpeername()), _end(sock.getsockname()))
        sock.setblocking(False)
        crowd = {} if is_own else self._crowd_with_room(ends.client[0])
        newcomer = _Newcomer(sock, ends.client[0], ends, is_own, time.monotonic() + HOLD_S, crowd)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._read_first_byte(newcomer))
        self._undecided[newcomer] = crowd[newcomer] = None

    def wait_s(self) -> float | None:
        """When :meth:`expire` has something to do; None: not now."""
        ends_s = [one.until_s for one in itertools.islice(self._undecided, 1)]
        ends_s += [one.until_s for one in itertools.islice(self._unproven, 1)]
        return max(0.0, min(ends_s) - time.monotonic()) if ends_s else None

    def expire(self) -> None:
        """Refuse connections that have been undecided for too long."""
        now_s = time.monotonic()
        while self._undecided and (first := next(iter(self._undecided))).until_s <= now_s:
            self._refuse(first, self._why_undecided(first) if first.is_worker else None)
        while self._unproven and (channel := next(iter(self._unproven))).until_s <= now_s:
            self._close(channel)

    def close(self) -> None:
        """Close all connections that were not admitted."""
        channels = [channel for there in self._channels.values() for channel in there]
        for sock in [one.sock for one in self._undecided] + [
            one.sock for one in (*self._unproven, *channels)
        ]:
            sock.close()
        self._undecided.clear()
        self._unproven.clear()
        self._channels.clear()

    # -- connections ----------------------------------------------------------------------------

    def _crowd_with_room(self, host: str) -> _Crowd:
        """The oldest one makes room: what belongs to the run is decided within moments."""
        if host in self._channels:
            crowd, most, whom = self._of_members.setdefault(host, {}), MOST_OF_A_MEMBER, "there"
        else:
            crowd, most, whom = self._strangers, MOST_STRANGERS, "machines without an agent of this run"
        if len(crowd) >= _affordable(most):
            oldest = next(iter(crowd))
            if isinstance(oldest, _Channel):
                self._close(oldest)
            else:
                self._refuse(oldest, f"too many connections from {whom}")
        return crowd

    def _read_first_byte(self, newcomer: _Newcomer) -> None:
        """An agent's channel, or a client of the store: it says so in its first byte, which stays unread."""
        if newcomer not in self._undecided:
            return  # refused by an earlier event of the same round
        try:
            first = newcomer.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            first = b""
        if not first:
            self._refuse(newcomer, None)
            return
        if first == HELLO[:1]:
            self._forget(newcomer)
            self._open_channel(newcomer)
            return
        self._selector.unregister(newcomer.sock)
        newcomer.is_worker = True
        if newcomer.is_own:
            self._let_in(newcomer)
        else:
            self._ask_those_who_may_know(newcomer)

    def _let_in(self, newcomer: _Newcomer) -> None:
        self._forget(newcomer)
        try:
            check_connected(newcomer.sock)
        except OSError:
            newcomer.sock.close()
        else:
            self._admit(newcomer.sock)

    def _refuse(self, newcomer: _Newcomer, why: str | None) -> None:
        """``why``: to report; None: there is nothing to report."""
        if not newcomer.is_worker:
            self._selector.unregister(newcomer.sock)
        self._forget(newcomer)
        newcomer.sock.close()
        if why is not None:
            self._report(newcomer.host, f"refused a connection to {self._shown} from {newcomer.host}: {why}")

    def _forget(self, newcomer: _Newcomer) -> None:
        del self._undecided[newcomer]
        newcomer.crowd.pop(newcomer, None)
        for channel, number in newcomer.asked.items():
            del channel.asked[number]
        newcomer.asked.clear()

    def _report(self, host: str, message: str) -> None:
        if host not in self._reported and len(self._reported) < MOST_REPORTED:
            self._reported.add(host)
            get_logger().warning(message)

    def _why_undecided(self, newcomer: _Newcomer) -> str:
        if newcomer.host in self._channels:
            return f"the agent there did not identify its owner within {HOLD_S:g} s"
        return (
            "no agent of this run is connected from there (if it is a worker's, the network translates its "
            "address, which the bootstrap store does not support)"
        )

    # -- questions ------------------------------------------------------------------------------

    def _ask_those_who_may_know(self, newcomer: _Newcomer) -> None:
        """The agents at the address that it comes from; if there are none, all: a machine may have several."""
        if there := self._channels.get(newcomer.host):
            for channel in there:
                self._ask(channel, newcomer)
        else:
            self._ask_of_all(newcomer, [one for channels in self._channels.values() for one in channels])

    def _ask_of_all(self, newcomer: _Newcomer, channels: Collection[_Channel]) -> None:
        """Within limits: every stranger causes as many questions as there are agents."""
        now_s = time.monotonic()
        self._quiet_from_s = max(self._quiet_from_s, now_s)
        if self._quiet_from_s > now_s + HOLD_S:
            return
        self._quiet_from_s += len(channels) / QUESTIONS_TO_ALL_PER_S
        for channel in channels:
            self._ask(channel, newcomer)

    def _ask(self, channel: _Channel, newcomer: _Newcomer) -> None:
        if len(channel.unsent) > MOST_UNSENT_BYTES:
            return  # the agent there does not read what it was asked already
        number = next(self._numbers) % (1 << 32)
        channel.asked[number] = newcomer
        newcomer.asked[channel] = number
        self._send(channel, channel.end.question(Question(number, newcomer.ends)))

    def _answered(self, channel: _Channel, answer: Answer) -> None:
        newcomer = channel.asked.pop(answer.number, None)
        if newcomer is None:
            return  # another agent's answer was enough, or too late
        del newcomer.asked[channel]
        if answer.is_same_user:
            self._let_in(newcomer)
        elif not newcomer.asked and newcomer.host in self._channels:
            self._refuse(newcomer, "on that machine, no process of the agent's user owns it")

    # -- channels -------------------------------------------------------------------------------

    def _open_channel(self, newcomer: _Newcomer) -> None:
        crowd = newcomer.crowd
        channel = _Channel(newcomer.sock, newcomer.host, RelayEnd(self._seal), newcomer.until_s, crowd)
        self._unproven[channel] = crowd[channel] = None
        self._selector.modify(channel.sock, selectors.EVENT_READ, lambda: self._serve(channel))
        with contextlib.suppress(OSError):  # what is broken is noticed when it is read
            set_up_for_messages(channel.sock)

    def _serve(self, channel: _Channel) -> None:
        if channel.sock.fileno() < 0:
            return  # closed by an earlier event of the same round
        try:
            self._flush(channel)
            data = channel.sock.recv(_CHUNK_BYTES)
            if not data:
                raise ConnectionResetError
            reply, answers = channel.end.received(data)
        except BlockingIOError:
            return
        except IdentificationError as error:
            self._report(channel.host, f"refused an agent at {channel.host} at {self._shown}: {error}")
            self._close(channel)
            return
        except OSError:
            self._close(channel)
            return
        self._send(channel, reply)
        if channel in self._unproven and channel.end.is_open:
            self._proved(channel)
        for answer in answers:
            self._answered(channel, answer)

    def _proved(self, channel: _Channel) -> None:
        """The agent has the secret. Workers may have connected before its channel was there, or there again."""
        del self._unproven[channel], channel.crowd[channel]
        self._channels.setdefault(channel.host, {})[channel] = None
        for newcomer in [*self._undecided]:
            if newcomer.is_worker and channel.host == newcomer.host:
                self._ask(channel, newcomer)
            elif newcomer.is_worker and newcomer.host not in self._channels:
                self._ask_of_all(newcomer, [channel])

    def _send(self, channel: _Channel, data: bytes) -> None:
        if not data:
            return
        channel.unsent += data
        with contextlib.suppress(OSError):  # what is broken is noticed when it is read
            self._flush(channel)

    def _flush(self, channel: _Channel) -> None:
        with contextlib.suppress(BlockingIOError):
            while channel.unsent:
                del channel.unsent[: channel.sock.send(channel.unsent)]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.unsent else 0)
        key = self._selector.get_key(channel.sock)
        if key.events != wanted:
            self._selector.modify(channel.sock, wanted, key.data)

    def _close(self, channel: _Channel) -> None:
        self._unproven.pop(channel, None)
        channel.crowd.pop(channel, None)
        there = self._channels.get(channel.host, {})
        there.pop(channel, None)
        if not there:
            self._channels.pop(channel.host, None)
        self._selector.unregister(channel.sock)
        channel.sock.close()
        for newcomer in channel.asked.values():
            del newcomer.asked[channel]


def _affordable(most: int) -> int:
    """Descriptors have to be left for the run's own workers, and for the rest of the agent."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most if limit == resource.RLIM_INFINITY else min(most, limit // 4)


def _end(address: tuple[str, int]) -> tuple[str, int]:
    """Without a scope, and IPv4 as IPv4 also where the socket is one for both."""
    host = ipaddress.ip_address(address[0].partition("%")[0])
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return str(mapped or host), address[1]
