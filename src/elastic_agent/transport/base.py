"""The interfaces of a store: what the rest of the package needs of it, and nothing more.

Every call may block, for at most the link's time-out, and is therefore made from a thread that can be
abandoned (see :mod:`.abandonable_thread`), never from the loop that must act on time. A link is used by one thread
at a time: a blocking wait occupies it.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

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
    """Base of all errors of a store; the message is one line."""

    def __init__(self, message: str = "", obstacle: Obstacle = Obstacle.OTHER) -> None:
        super().__init__(message)
        self.obstacle = obstacle


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


class NodeLink(Protocol):
    """A node's connection to the store of one run."""

    @property
    def store_id(self) -> str:
        """Random name of this life of the store; a new one means that everything written before is gone."""

    @property
    def local_address(self) -> str:
        """The address of this machine on the way to the store: one that the other nodes can reach too."""

    def register(self, member: Member, lease: Lease) -> Lease | None:
        """Register an incarnation with its first records (or write them again).

        Returns the lease as it was written, which differs from ``lease`` in its beat if an earlier one of this
        incarnation was there; None, and nothing is written, if that one was revoked.
        """

    def write(self, member: Member) -> None:
        """Replace the member record and hint to the coordinator that it changed."""

    def renew(self, expected: Lease, renewed: Lease) -> bool:
        """Compare-and-set the lease; False if it is not as expected any more (revoked, or gone)."""

    def read_lease(self, incarnation: str) -> Lease | None:
        """The lease as it stands in the store (to settle an unknown outcome), or None."""

    def read_plan(self) -> Plan | None:
        """The newest plan, or None before the first."""

    def read_status(self) -> str:
        """Return the text that tells what the coordinator is waiting for; empty if it wrote nothing."""

    def next_plan(self, after_version: int, timeout_s: float) -> Plan | None:
        """Wait, without polling, until a plan newer than ``after_version`` is there; None at the time-out.

        Plans may be skipped: the newest is returned.

        Raises:
            OtherVersionError: no plan can be read, because another version of elastic-agent coordinates the run.
        """

    def close(self) -> None:
        """Close the connection; never blocks."""


@dataclass(frozen=True)
class Snapshot:
    """Records of some or all incarnations of a run. Bad records are left out and described in ``rejected``."""

    members: Mapping[str, Member] = field(default_factory=dict)
    leases: Mapping[str, Lease] = field(default_factory=dict)
    rejected: tuple[str, ...] = ()
    written_s: Mapping[str, float] = field(default_factory=dict)
    """The latest time at which each lease can have been written (``time.monotonic()``), where known."""


class CoordinatorLink(Protocol):
    """The coordinator's connection to the store of one run."""

    def read(self, incarnations: Collection[str] | None) -> Snapshot:
        """Member and lease records of these incarnations, or of all that ever registered (None)."""

    def read_leases(self) -> Mapping[str, Lease]:
        """All leases, in one request."""

    def read_plan(self) -> Plan | None:
        """The newest plan, or None before the first."""

    def publish(self, plan: Plan) -> bool:
        """Write the plan if its version still follows the newest; False if another writer was first."""

    def write_status(self, text: str) -> None:
        """Write a text that tells what is awaited; overwrites the text before."""

    def revoke(self, lease: Lease, why: str = "") -> bool:
        """Compare-and-set the lease to its revoked form; False if it was renewed meanwhile."""

    def forget(self, incarnation: str) -> None:
        """Remove an incarnation's records."""


@dataclass(frozen=True)
class RunView:
    """Everything that a store holds about a run, for people who ask; no decision depends on it."""

    plan: Plan | None = None
    status: str = ""
    """What the coordinator is waiting for (see :class:`~elastic_agent.protocol.Waiting`)."""
    snapshot: Snapshot = field(default_factory=Snapshot)
    reports: Mapping[str, bytes] = field(default_factory=dict)
    """The reports of each node, by node id, as the node wrote them."""


class ReportLink(Protocol):
    """A connection over which a node exchanges reports with the other nodes of its run."""

    def write_report(self, node_id: str, data: bytes) -> None:
        """Replace the node's reports. A write that arrives late may replace a newer one."""

    def read_run(self) -> RunView:
        """All that the store holds about the run."""

    def read_waiting_runs(self) -> Mapping[str, Snapshot]:
        """Other runs that wait at this endpoint for nodes and have never had enough, by id; a few at most.

        Empty where many runs that have nothing to do with each other share a store by design.
        """

    def close(self) -> None:
        """Close the connection; never blocks."""


class ExchangeLink(Protocol):
    """A connection over which programs that are no part of a run exchange values at its endpoint."""

    @property
    def local_address(self) -> str:
        """The address of this machine on the way to the store."""

    def write(self, topic: str, name: str, value: bytes) -> None:
        """Replace what is stored under this name."""

    def read(self, topic: str) -> Mapping[str, bytes]:
        """All values of a topic, by name."""

    def decide(self, topic: str, value: bytes) -> bytes:
        """The decision: the first value proposed; ``b""`` proposes none, and answers ``b""`` if there is none."""

    def remove(self, topic: str) -> None:
        """Remove everything of a topic."""

    def close(self) -> None:
        """Close the connection; never blocks."""
