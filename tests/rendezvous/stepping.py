"""Runs drivers whose effects a test answers at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from elastic_agent.rendezvous.effects import Effect, Steps, T

E = TypeVar("E", bound=Effect[Any])


def run(steps: Steps[T], perform: Callable[[Effect[Any]], Any]) -> T:
    """Run a driver to its end; ``perform`` returns the answer to one effect, or raises its error."""
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
    """Run a driver until it yields an effect of this kind; None at its end.

    ``answer``: to the effect at which it is suspended; None for a new driver.
    """
    try:
        effect = steps.send(answer)
        while not isinstance(effect, kind):
            effect = _resume(steps, perform, effect)
    except StopIteration:
        return None
    return effect


def _resume(steps: Steps[Any], perform: Callable[[Effect[Any]], Any], effect: Effect[Any]) -> Effect[Any]:
    try:
        answer = perform(effect)
    except Exception as error:
        return steps.throw(error)
    return steps.send(answer)
