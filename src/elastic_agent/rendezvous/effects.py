"""Drivers without I/O: generators that yield effects, which a runner performs.

A driver decides which requests to make to the store, the disk and the clock, and in which order. It performs none:
it yields an *effect* and receives the answer; an error of the effect is raised where it was yielded.

    plan = yield from StoreCall(CoordinatorRecords.read_plan)

The agent performs effects in an asyncio task. The simulator performs them against its models of the store and the
disk, in virtual time, and can stop or kill the driver's process between any two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from tenacity import RetryCallState, Retrying, wait_exponential

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")


class Effect(Generic[T_co]):
    """A request of a driver to its runner; ``T_co`` is the type of the answer."""

    __slots__ = ()

    def __iter__(self) -> Generator[Effect[Any], Any, T_co]:
        """Yield this effect and return its answer: ``answer = yield from effect``."""
        answer: T_co = yield self
        return answer


class Request(Generic[T_co]):
    """A method, to be called on the object that the runner has for it, and its arguments."""

    __slots__ = ("args", "kwargs", "method")
    __match_args__ = ("method", "args")

    def __init__(
        self,
        method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T_co]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        self.method, self.args, self.kwargs = method, args, kwargs

    def perform(self, target: object) -> Coroutine[Any, Any, T_co]:
        """Return the coroutine that performs it."""
        return self.method(target, *self.args, **self.kwargs)


Steps = Generator[Effect[Any], Any, T]
"""A driver, or a part of one, under way; ``T`` is what it returns."""


@dataclass(frozen=True)
class Sleep(Effect[None]):
    """Let time pass."""

    seconds: float


@dataclass(frozen=True)
class BackOff(Effect[None]):
    """Let a random time pass before another attempt: others may be attempting the same."""

    most_s: float


def back_offs(first_s: float, most_s: float) -> Iterator[float]:
    """How long to wait at most after the first failed attempt, after the second one and so on.

    Tenacity's strategy without its loop, which sleeps and draws random numbers: here both are the runner's part.
    """
    wait = wait_exponential(multiplier=first_s, max=most_s)
    attempts = RetryCallState(Retrying(), None, (), {})
    while True:
        yield wait(attempts)
        attempts.attempt_number += 1


class Signal:
    """A flag that one part of a driver, or its owner, sets and another part waits for; a set before the wait is not
    lost.

    One part waits for it at a time.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._wake: Callable[[], None] | None = None

    def set(self) -> None:
        """Wake the part that waits, or that will wait next."""
        self._is_set = True
        if self._wake is not None:
            self._wake()

    def take(self) -> bool:
        """Whether it was set; it is not any more."""
        was_set, self._is_set = self._is_set, False
        return was_set

    def on_set(self, wake: Callable[[], None] | None) -> bool:
        """For runners: have this called with the next set; whether it is set already."""
        self._wake = wake
        return self._is_set


@dataclass(frozen=True)
class Wait(Effect[bool]):
    """Wait until the signal is set, and clear it; False if that takes longer than the time-out."""

    signal: Signal
    timeout_s: float | None = None


@dataclass(frozen=True)
class UntilOneEnds(Effect[None]):
    """Run these side by side until one of them ends, and close the others; raises what that one raised.

    No part waits for an effect of another one: a timer continues while a request of its sibling hangs.
    """

    parts: tuple[Steps[None], ...]
