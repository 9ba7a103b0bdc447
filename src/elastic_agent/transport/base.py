"""The errors of a store, and what is read from it at once."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_agent.protocol import Lease, Member, Plan


class Obstacle(enum.Enum):
    """Why a store was not reached, as far as callers need to know."""

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
    """What the coordinator is waiting for (see :class:`~elastic_agent.protocol.Waiting`)."""
    snapshot: Snapshot = field(default_factory=Snapshot)
    reports: Mapping[str, bytes] = field(default_factory=dict)
    """The reports of each node, by node id, as the node wrote them."""
