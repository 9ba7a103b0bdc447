"""Performs what the shipped drivers yield (``rendezvous/effects.py``) in the tasks of a process, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar, cast

from elastic_agent.rendezvous.effects import BackOff, Effect, Sleep, Steps, UntilOneEnds, Wait
from elastic_agent.transport.base import StoreLostError, TransportError

from .kernel import Inbox, Process, Routine, Task
from .machine import Machine

T = TypeVar("T")

HAIR_S = 1e-9
"""So much later a timer fires, or rounding could make it fire just before what it was set for."""


def awaited(work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """Return a coroutine of the shipped records as a sub-routine: it yields whenever it waits for the store."""
    return cast(Generator[Any, Any, T], work.__await__())


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
