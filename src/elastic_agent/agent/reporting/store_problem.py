"""Why the store does not answer: what of it is worth a warning, and when."""

from __future__ import annotations

import time

from elastic_agent.transport import Obstacle

PATIENCE_S = 2.0
"""A shorter problem is not reported."""

_TRANSIENT = (Obstacle.REFUSED, Obstacle.CLOSED)
"""As while the agent there starts or dies; the start check warns of it if it lasts."""

_ANY = (Obstacle.EXPLAINED, Obstacle.OTHER)
"""Not one problem each: of these, the reason tells them apart."""


class StoreProblem:
    """The present problem, which is to be told once; and another one later, once too."""

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
        """An attempt to connect failed; ``now_s`` is on a clock that never goes back."""
        if not self.reason or (self.obstacle in _TRANSIENT and obstacle not in _TRANSIENT):
            self._since_s = now_s
        self.reason, self.obstacle = reason, obstacle

    def over(self) -> None:
        """The store answers."""
        self.reason = ""
        self._told.clear()

    def lost(self) -> None:
        """The connection to a store that had answered is lost."""
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
        """The reason, if it is to be told now; from then on it counts as told."""
        has_lasted = self.is_urgent or now_s - self._since_s >= PATIENCE_S
        problem = self.reason if self.obstacle in _ANY else self.obstacle.name
        if not self.reason or not has_lasted or problem in self._told or self.obstacle in _TRANSIENT:
            return ""
        self._told.add(problem)
        return self.reason
