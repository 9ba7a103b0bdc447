"""A store as what is above it sees it: its table of keys and values, its errors and their remedies, and views of it.

Everything that knows a record of a run (:mod:`.records`) is written once, above a :class:`Table`. There
are two: torch's TCPStore (:mod:`.c10d.table`) and etcd (:mod:`.etcd.table`).
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from elastic_agent.protocol import Lease, Member, Plan


class Obstacle(enum.Enum):
    """The reason why a store was not reached, as far as callers need to know."""

    REFUSED = enum.auto()
    """The machine answers that nothing listens there."""
    CLOSED = enum.auto()
    """The connection was closed without an answer."""
    NO_ANSWER = enum.auto()
    """The time-out is over, and no packet came back."""
    UNREACHABLE = enum.auto()
    """A router, or this machine, answers that there is no such machine; so do some firewalls."""
    SILENT = enum.auto()
    """The connection is accepted, and no answer comes in time."""
    UNKNOWN_NAME = enum.auto()
    """The host name does not resolve."""
    OWN_NETWORK = enum.auto()
    """No packet leaves this machine: it has no route, or an interface of it is down."""
    EXPLAINED = enum.auto()
    """The message says why it cannot be used: it answers, or the fault is this process's."""
    OTHER = enum.auto()


class TransportError(Exception):
    """Base of all errors of a store; the message is one line: the problem, and the remedy if there is one."""

    def __init__(self, problem: str = "", obstacle: Obstacle = Obstacle.OTHER, remedy: str = "") -> None:
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.problem = problem
        self.obstacle = obstacle
        self.remedy = remedy


class StoreLostError(TransportError):
    """The store did not answer, or the connection broke. The request may or may not have been carried out."""


class UnreachableError(TransportError):
    """Nothing answers at the endpoint, or its name cannot be resolved; dialling again may help."""


class NotAStoreError(TransportError):
    """The endpoint answers, but is not a store of elastic-agent; dialling again will not help."""


class WrongKeyError(NotAStoreError):
    """The store's coordinator has another secret, or only one side has one; dialling again will not help."""


class OtherVersionError(TransportError):
    """Another version of elastic-agent coordinates the run; trying again will not help."""


def silent(shown: str, timeout_s: float) -> UnreachableError:
    """Return the error of a server that accepts connections and answers nothing."""
    return UnreachableError(
        f"{shown} accepts connections but did not answer within {timeout_s:g} s (the agent that "
        "hosts the store is frozen or overloaded, or another program listens there: `ss -ltnp` on that machine "
        "shows which)",
        Obstacle.SILENT,
    )


def not_a_store(shown: str, answer: bytes) -> NotAStoreError:
    """Return the error of a server that answers otherwise than a store."""
    return NotAStoreError(
        f"{shown} is used by another program, which is not a store (it answered {answer[:32]!r}); use "
        "another port, or stop that program"
    )


@dataclass(frozen=True)
class Snapshot:
    """Records of some or all incarnations of a run, without those that are invalid."""

    members: Mapping[str, Member] = field(default_factory=dict)
    leases: Mapping[str, Lease] = field(default_factory=dict)
    written_s: Mapping[str, float] = field(default_factory=dict)
    """The latest time at which each lease can have been written (``time.monotonic()``), where known."""


@dataclass(frozen=True)
class RunView:
    """Everything that a store holds about a run, for people who ask; no decision depends on it."""

    plan: Plan | None = None
    status: str = ""
    """The text about what the coordinator is waiting for (see :class:`~elastic_agent.protocol.Waiting`)."""
    snapshot: Snapshot = field(default_factory=Snapshot)
    reports: Mapping[str, bytes] = field(default_factory=dict)
    """The reports of each node, by node id, as the node wrote them."""


class Table(Protocol):
    """One connection to a store. Keys are paths below a root that belongs to elastic-agent.

    A value has at least one byte: one without counts as missing.

    Every call raises:
        StoreLostError: no answer in time, or the connection broke; whether the call was carried out is not known.
    """

    @property
    def store_id(self) -> str:
        """Random name of this life of the store; a new one means that everything written before is gone."""

    @property
    def local_address(self) -> str:
        """The address of this machine on the way to the store: one that the other nodes can reach too."""

    @property
    def root(self) -> str:
        """The prefix of every key in the store, as users find it there."""

    @property
    def is_shared(self) -> bool:
        """True if many runs that have nothing to do with each other use this store by design."""

    async def read(self, keys: Collection[str]) -> dict[str, bytes]:
        """Return the values of those keys that are there."""

    async def keys(self, folder: str) -> Sequence[str]:
        """Return every key that begins with ``folder``."""

    async def read_folders(self, *folders: str) -> dict[str, bytes]:
        """Return every key that begins with one of ``folders``, with its value."""

    async def swap(self, key: str, expected: bytes | None, desired: bytes) -> bytes | None:
        """Write ``desired`` if the value is ``expected`` (None: if there is none); return the value afterwards."""

    async def put(self, key: str, value: bytes, lasts_s: float | None = None) -> None:
        """Write; after ``lasts_s`` seconds the store may remove the key."""

    async def delete(self, keys: Collection[str], *folders: str) -> None:
        """Remove those keys that are there, then every key that begins with one of ``folders``."""

    async def wait(self, key: str, timeout_s: float) -> bool:
        """Wait until the key has been written since this connection read it last; False at the time-out."""

    async def hint(self, run_id: str, incarnation: str) -> None:
        """Tell the coordinator of a run that this member record was written."""

    def written_by(self, key: str) -> float | None:
        """Return the latest time at which what was read last under this key can have been written.

        By ``time.monotonic()``; None: not known.
        """

    def close(self) -> None:
        """Close the connection; never blocks."""


def how_to_reach(
    obstacle: Obstacle, where: str, port: int, start: str = "the same command", *, had_answered: bool = False
) -> str:
    """Return what to do, in words; empty: the error says it.

    Args:
        obstacle: what the last attempt ended with.
        where: the machine of the store, as the user knows it.
        port: of the store.
        start: what to start there.
        had_answered: the store answered before: the endpoint is right.
    """
    opens = f"open the port there: firewall-cmd --add-port={port}/tcp, or ufw allow {port}/tcp"
    checks_endpoint = "check that the endpoint is an address of one of the machines"
    match obstacle, had_answered:
        case Obstacle.REFUSED, True:
            return f"start {start} on {where} again"
        case Obstacle.REFUSED, False:
            compare = f"compare its port with {port}, then check its address and its firewall"
            return f"start {start} on {where}; if it runs there, {compare}"
        case Obstacle.NO_ANSWER, _:
            return f"if {where} is down, switch it on and start {start} there; if it is up, {opens}"
        case Obstacle.UNREACHABLE, True:
            return f"connect {where} to the network again, or switch it on and start {start} there"
        case Obstacle.UNREACHABLE, False:
            return f"{checks_endpoint} that is up and in this network; if `ping {where}` is answered, {opens}"
        case Obstacle.SILENT, True:
            return f"continue what hosts it on {where} (kill -CONT PID), or stop that and start {start} there again"
        case Obstacle.SILENT | Obstacle.CLOSED, False:
            return (
                f"stop what `ss -ltnp` on {where} shows for port {port}, or use another port on all machines"
            )
        case Obstacle.CLOSED | Obstacle.OTHER, True:
            return f"if it has ended there, start {start} on {where} again"
        case Obstacle.OTHER, False:
            return f"{checks_endpoint}, that {start} runs there, and that it has port {port}"
        case Obstacle.OWN_NETWORK, False:
            return f"if the network of this machine is as it should be, {checks_endpoint}"
    return ""
