"""Performs what the parts of a node's session yield (see ``rendezvous/effects.py``) in the tasks of a process."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

from elastic_agent.rendezvous.effects import BackOff, Effect, Sleep, Steps, UntilOneEnds, Wait
from elastic_agent.transport.base import StoreLostError, TransportError

from .driving import drive
from .kernel import Inbox, Process, Routine, Task
from .machine import Machine

T = TypeVar("T")

HAIR_S = 1e-9
"""So much later a timer fires, or rounding could make it fire just before what it was set for."""


class Performer:
    """Performs what every driver asks for; a subclass adds what only some ask for."""

    def __init__(self, machine: Machine, process: Process) -> None:
        self.machine = machine
        self.process = process
        self.kernel = process.kernel

    def spawn(self, steps: Steps[Any]) -> Task:
        """Run a driver as a task of its own."""
        return self.process.spawn(self.run(steps))

    def run(self, steps: Steps[T]) -> Generator[Any, Any, T]:
        """Run a driver in the calling task, to its end."""
        result: T = yield from drive(steps, self.perform)
        return result

    def perform(self, effect: Effect[Any]) -> Routine:
        """One effect; a sub-routine of the calling task."""
        match effect:
            case Sleep():
                yield self.machine.real_s(effect.seconds) + HAIR_S
            case BackOff():
                yield effect.most_s * self.kernel.random.random()
            case Wait():
                return (yield from self._wait(effect))
            case UntilOneEnds():
                yield from self._until_one_ends(effect)
            case _:
                raise NotImplementedError(effect)
        return None

    def within(self, timeout_s: float, routine: Routine) -> Routine:
        """A sub-routine that waits for answers, none of them longer than until this time is over."""
        ends_s = self.kernel.now + self.machine.real_s(timeout_s)
        try:
            inbox, wait_s = next(routine)
            while True:
                left_s = max(0.0, ends_s - self.kernel.now)
                item = yield inbox, left_s if wait_s is None else min(left_s, wait_s)
                if left_s == 0.0:
                    raise StoreLostError(f"no answer within {timeout_s:g} s")
                inbox, wait_s = routine.send(item)
        except StopIteration as end:
            return end.value
        finally:
            routine.close()

    def _wait(self, effect: Wait) -> Routine:
        woken = Inbox(self.kernel)
        try:
            if not effect.signal.on_set(lambda: woken.put(None)):
                timeout_s = effect.timeout_s
                yield woken, self.machine.real_s(timeout_s) if timeout_s is not None else None
        finally:
            effect.signal.on_set(None)
        return effect.signal.take()

    def _until_one_ends(self, effect: UntilOneEnds) -> Routine:
        ended = Inbox(self.kernel)
        tasks = [self.process.spawn(self._part(part, ended)) for part in effect.parts]
        try:
            error = yield ended, None
        finally:
            for task in tasks:
                task.cancel()
        if error is not None:
            raise error

    def _part(self, part: Steps[None], ended: Inbox) -> Routine:
        error: TransportError | None = None
        try:
            yield from self.run(part)
        except TransportError as raised:
            error = raised
        ended.put(error)
