"""The events of a session. All of them are delivered in the owner's event loop, in order."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_agent.protocol import Failure, Plan
from elastic_agent.transport import NotAStoreError, Obstacle, TransportError


class SessionEvent:
    """An event of a session, for its owner."""


@dataclass(frozen=True)
class Connected(SessionEvent):
    """The store answers. ``replaced``: it is another one than before, everything written is gone."""

    store_id: str
    replaced: bool


@dataclass(frozen=True)
class Disconnected(SessionEvent):
    """The store does not answer; the session continues to dial."""

    reason: str
    obstacle: Obstacle = Obstacle.OTHER

    @classmethod
    def by(cls, error: TransportError) -> Disconnected:
        """Return a disconnection because of this error."""
        is_other = isinstance(error, NotAStoreError)
        return cls(str(error), Obstacle.EXPLAINED if is_other else error.obstacle)


@dataclass(frozen=True)
class Registered(SessionEvent):
    """This incarnation is known to the store and holds a lease until ``deadline_s`` (CLOCK_BOOTTIME)."""

    incarnation: str
    deadline_s: float


@dataclass(frozen=True)
class Renewed(SessionEvent):
    """The lease was renewed until ``deadline_s`` (CLOCK_BOOTTIME)."""

    deadline_s: float


@dataclass(frozen=True)
class LeaseLost(SessionEvent):
    """The lease was revoked or ran out; no worker may run."""

    reason: str
    unanswered: bool = False
    """It ran out because the store did not take a renewal."""


@dataclass(frozen=True)
class PlanSeen(SessionEvent):
    """A newer plan was read."""

    plan: Plan


@dataclass(frozen=True)
class Prepared(SessionEvent):
    """Lease, plan and bootstrap store of this generation are in order."""

    generation: int


@dataclass(frozen=True)
class PrepareFailed(SessionEvent):
    """The bootstrap store of this generation could not be reached."""

    generation: int
    failure: Failure


@dataclass(frozen=True)
class GivenUp(SessionEvent):
    """The store has not answered for the join time-out, or is of no use: this node cannot take part.

    Of no use: another program answers at the endpoint, or another version of elastic-agent coordinates the run.
    """

    reason: str
