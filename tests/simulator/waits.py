"""The shipped drivers' ways of waiting (``rendezvous/waits.py``), and their coroutines as tasks of a process."""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar, cast

from elastic_agent.rendezvous.waits import Signal, Waits
from elastic_agent.transport.base import StoreLostError, TransportError

from .kernel import Inbox, Process, Routine, Task
from .machine import Machine

T = TypeVar("T")

HAIR_S = 1e-9
"""So much later a timer fires, or rounding could make it fire just before what it was set for."""


def awaited(work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """Return a coroutine of shipped code as a sub-routine: it yields whenever it waits."""
    return cast(Generator[Any, Any, T], work.__await__())


@types.coroutine
def performed(routine: Routine) -> Generator[Any, Any, Any]:
    """Carry out a sub-routine in a coroutine."""
    return (yield from routine)


@types.coroutine
def pause(seconds: float) -> Generator[Any, Any, None]:
    """Sleep in a coroutine."""
    yield seconds


@types.coroutine
def take(inbox: Inbox, timeout_s: float | None) -> Generator[Any, Any, Any]:
    """Wait for an item in a coroutine; None at the time-out."""
    return (yield inbox, timeout_s)


class SimulatedSignal(Signal):
    """A signal between tasks of a process."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self._woken: Inbox | None = None

    def set(self) -> None:
        super().set()
        if self._woken is not None:
            self._woken.put(None)

    async def wait(self, timeout_s: float | None = None) -> bool:
        woken = self._woken = Inbox(self._machine.kernel)
        try:
            if not self._event.is_set():
                wait_s = self._machine.real_s(timeout_s) + HAIR_S if timeout_s is not None else None
                await take(woken, wait_s)
        finally:
            self._woken = None
        return self.take()


class SimulatedWaits(Waits):
    """Waits of a process, by its machine's clock."""

    def __init__(self, machine: Machine, process: Process) -> None:
        self.machine = machine
        self.process = process
        self.kernel = process.kernel

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> Task:
        """Run a driver as a task of its own; its coroutine is made when the task begins, if it does."""

        def begun() -> Routine:
            yield from awaited(work())

        return self.process.spawn(begun())

    def signal(self) -> Signal:
        return SimulatedSignal(self.machine)

    async def sleep(self, seconds: float) -> None:
        await pause(self.machine.real_s(seconds) + HAIR_S)

    async def back_off(self, most_s: float) -> None:
        await pause(most_s * self.kernel.random.random())

    async def in_time(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        answer: T = await performed(self._within(timeout_s, awaited(work)))
        return answer

    async def until_one_ends(self, *parts: Coroutine[Any, Any, None]) -> None:
        ended = Inbox(self.kernel)
        tasks = [self.process.spawn(self._part(part, ended)) for part in parts]
        try:
            error = await take(ended, None)
        finally:
            for task, part in zip(tasks, parts, strict=True):
                task.cancel()
                part.close()  # it may not have begun
        if error is not None:
            raise error

    def _part(self, part: Coroutine[Any, Any, None], ended: Inbox) -> Routine:
        error: TransportError | OSError | None = None
        try:
            yield from awaited(part)
        except (TransportError, OSError) as raised:  # what goes wrong in the universe, and not with it
            error = raised
        ended.put(error)

    def _within(self, timeout_s: float, routine: Routine) -> Routine:
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
