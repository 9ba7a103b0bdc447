"""How fast the training of a node advances. Pure: times are arguments."""

from __future__ import annotations

SHORTEST_S = 4.0
"""A rate over less time would mostly show chance."""


class StepRate:
    """Steps per second of one generation, between two looks."""

    def __init__(self) -> None:
        self._generation = 0
        self._begin: tuple[int, float] | None = None
        self.per_s: float | None = None
        """The newest rate; None: not known."""

    def see(self, generation: int, step: int, now_s: float) -> None:
        """The newest step of any worker, by a clock that does not jump; 0: none was reported."""
        if generation != self._generation:
            self._generation, self._begin, self.per_s = generation, None, None
        if step <= 0:
            return
        if self._begin is None:
            self._begin = step, now_s
            return
        before, since_s = self._begin
        if now_s - since_s >= SHORTEST_S:
            self.per_s = max(0.0, (step - before) / (now_s - since_s))
            self._begin = step, now_s
