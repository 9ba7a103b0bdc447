"""Why the store does not answer, since when, and what of it is worth a warning."""

from __future__ import annotations

import time

from elastic_agent.agent.events import Event
from elastic_agent.rendezvous.events import Disconnected, LeaseLost, PlanSeen, Registered, Renewed
from elastic_agent.transport import Obstacle

PATIENCE_S = 2.0
"""A shorter problem is not reported."""

_TRANSIENT = (Obstacle.REFUSED, Obstacle.CLOSED)
"""As while the agent there starts or dies; the start check warns of it if it lasts."""

_ANY = (Obstacle.EXPLAINED, Obstacle.OTHER)
"""Each of these stands for several problems, which differ in the reason."""


class StoreProblem:
    """The present problem, which is logged once; a later one, too."""

    def __init__(self) -> None:
        self.reason = ""
        """As the last attempt to connect ended; empty: the store answers."""
        self.obstacle = Obstacle.OTHER
        self._since_s = 0.0
        self._told: set[str] = set()
        self.lost_at = ""
        """When the connection was lost last, as a time of the day."""
        self.is_loss_told = True
        """That loss was reported, if there was one."""
        self.has_ended_lease = False
        """The lease of this node ran out because of it."""

    def seen(self, reason: str, obstacle: Obstacle, now_s: float) -> None:
        """Note that an attempt to connect failed; ``now_s`` is on a clock that never goes back."""
        if not self.reason or (self.obstacle in _TRANSIENT and obstacle not in _TRANSIENT):
            self._since_s = now_s
        self.reason, self.obstacle = reason, obstacle

    def over(self) -> None:
        """Note that the store answers."""
        self.reason = ""
        self._told.clear()

    def lost(self) -> None:
        """Note that the connection to a store that had answered is lost."""
        self.lost_at, self.is_loss_told = time.strftime("%H:%M:%S"), False

    @property
    def is_urgent(self) -> bool:
        """Whether it has lasted for long when it was noticed first, or is not expected to pass by itself."""
        return self.obstacle in (
            Obstacle.NO_ANSWER,
            Obstacle.UNREACHABLE,
            Obstacle.SILENT,
            Obstacle.UNKNOWN_NAME,
            Obstacle.OWN_NETWORK,
        )

    def due(self, now_s: float) -> str:
        """Return the reason, if it is to be logged now; from then on it counts as logged."""
        has_lasted = self.is_urgent or now_s - self._since_s >= PATIENCE_S
        problem = self.reason if self.obstacle in _ANY else self.obstacle.name
        if not self.reason or not has_lasted or problem in self._told or self.obstacle in _TRANSIENT:
            return ""
        self._told.add(problem)
        return self.reason


class Outage:
    """Since when the store has not answered this agent, for the status of the run."""

    def __init__(self) -> None:
        self.since_s: float | None = None
        """Seconds since 1970; None: it answers."""
        self.reason = ""
        self.was_away = False
        """This node has lost its lease and seen no plan since."""

    def take_in(self, event: Event) -> None:
        """Update it from an event."""
        match event:
            case Disconnected(reason=reason, obstacle=obstacle):
                self.since_s = self.since_s or time.time()
                if obstacle is Obstacle.OWN_NETWORK or not self.reason:
                    self.reason = reason  # a cause on this machine is certain, so it is kept
            case LeaseLost():
                self.was_away = True
            case Registered() | Renewed() | PlanSeen():  # a store that is full answers, but takes no records
                self.since_s, self.reason = None, ""
