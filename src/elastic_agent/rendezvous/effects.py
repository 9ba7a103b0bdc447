"""Drivers without I/O: generators that yield effects, which a runner performs.

A driver decides what is asked of the store, the disk and the clock, and in which order. It performs nothing itself:
it yields an *effect* and receives the answer; an error of the effect is raised where it was yielded.

    is_published = yield from Publish(plan)

The agent performs effects in a thread or an asyncio task. The simulator performs them against its models of the store
and the disk, in virtual time, and can stop or kill the driver's process between any two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")
E = TypeVar("E", bound="Effect[Any]")
T_co = TypeVar("T_co", covariant=True)


class Effect(Generic[T_co]):
    """What a driver asks of its runner; ``T_co`` is the type of the answer."""

    __slots__ = ()

    def __iter__(self) -> Generator[Effect[Any], Any, T_co]:
        """Yield this effect and return its answer: ``answer = yield from effect``."""
        answer: T_co = yield self
        return answer


Steps = Generator[Effect[Any], Any, T]
"""A driver, or a part of one, under way; ``T`` is what it returns."""


@dataclass(frozen=True)
class Sleep(Effect[None]):
    """Let time pass."""

    seconds: float


def run(steps: Steps[T], perform: Callable[[Effect[Any]], Any]) -> T:
    """Run a driver to its end in this thread.

    Args:
        steps: the driver.
        perform: performs one effect: returns the answer, or raises what the driver is to see.
    """
    try:
        effect = next(steps)
        while True:
            effect = _resume(steps, perform, effect)
    except StopIteration as end:
        result: T = end.value
        return result


def run_until(
    kind: type[E], steps: Steps[None], perform: Callable[[Effect[Any]], Any], answer: Any
) -> E | None:
    """Run a driver until it yields an effect of this kind, which the caller performs; None at its end.

    Args:
        kind: where to suspend the driver, to run others meanwhile.
        steps: the driver, new or suspended.
        perform: as for :func:`run`.
        answer: to the effect at which it is suspended; None for a new one.
    """
    try:
        effect = steps.send(answer)
        while not isinstance(effect, kind):
            effect = _resume(steps, perform, effect)
    except StopIteration:
        return None
    return effect


def _resume(steps: Steps[Any], perform: Callable[[Effect[Any]], Any], effect: Effect[Any]) -> Effect[Any]:
    """Perform an effect and give the driver the answer, or the error; the driver's next effect."""
    try:
        answer = perform(effect)
    except Exception as error:
        return steps.throw(error)
    return steps.send(answer)
