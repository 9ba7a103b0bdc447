"""The share of a node's time in which its workers trained. Pure: times are arguments."""

from __future__ import annotations

from msgspec import Struct


class Goodput(Struct, frozen=True, omit_defaults=True):
    """How one node spent its time since its agent was started, in seconds."""

    training_s: float = 0.0
    """From the first step that the workers report, or their start if they report none, until they end."""
    other_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The whole time, in seconds."""
        return self.training_s + self.other_s

    @property
    def share(self) -> float | None:
        """Training divided by the whole time, 0 to 1; None before any time has passed."""
        return self.training_s / self.total_s if self.total_s > 0 else None


class Account:
    """Counts the time of one node; times are seconds of a clock that does not jump."""

    def __init__(self, now_s: float) -> None:
        """Begin without workers."""
        self._began_s = now_s
        self._trained_s = 0.0
        """By workers that have ended."""
        self._training_since_s: float | None = None
        """None: no workers train."""
        self._has_steps = False
        """Workers of this node have reported steps."""
        self.awaits_step = False
        """Workers run, and no step of them is known yet."""

    def workers_started(self, now_s: float) -> None:
        """Begin the training, which is later if it is known that workers report steps: with their first one."""
        self.awaits_step = True
        self._training_since_s = None if self._has_steps else now_s

    def step(self, now_s: float) -> None:
        """Count the time until the first step of the workers as their start."""
        if self.awaits_step:
            self.awaits_step, self._has_steps = False, True
            self._training_since_s = now_s

    def workers_ended(self, now_s: float, *, trained: bool = True) -> None:
        """End the training; unless the workers ``trained``, their time does not count."""
        if self._training_since_s is not None and trained:
            self._trained_s += now_s - self._training_since_s
        self._training_since_s = None
        self.awaits_step = False

    def goodput(self, now_s: float) -> Goodput:
        """Return the account so far."""
        since_s = now_s if self._training_since_s is None else self._training_since_s
        training_s = self._trained_s + now_s - since_s
        return Goodput(training_s, max(0.0, now_s - self._began_s - training_s))
