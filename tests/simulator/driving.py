"""Runs the shipped drivers in virtual time: their effects are performed on the simulated store, disk and clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic_agent.rendezvous.effects import Effect, Steps
from elastic_agent.transport.base import TransportError

from .kernel import Routine


def drive(steps: Steps[Any], perform: Callable[[Effect[Any]], Routine]) -> Routine:
    """Run a driver to its end, as a sub-routine of a task; what it returns.

    Between any two of its effects its process may be frozen or killed, as at any other place where a task waits.
    """
    try:
        effect = next(steps)
        while True:
            try:
                answer = yield from perform(effect)
            except (TransportError, OSError) as error:  # what goes wrong in the universe, and not with it
                effect = steps.throw(error)
            else:
                effect = steps.send(answer)
    except StopIteration as end:
        return end.value
    finally:
        steps.close()
