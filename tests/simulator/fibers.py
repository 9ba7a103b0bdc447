"""Blocking code in virtual time: it runs in a thread, which goes on only while the simulator waits for it.

So the shipped links to a store, which block, run here as they are. One thread at a time runs, in an order that
only the seed decides.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from .kernel import Routine


class AbandonedError(BaseException):
    """The task that waited for this code is gone: so is the code."""


class _Worker(threading.Thread):
    """A thread for one piece of code after the other."""

    def __init__(self) -> None:
        super().__init__(name="fiber", daemon=True)
        self.go, self.back = threading.Lock(), threading.Lock()
        self.go.acquire()
        self.back.acquire()
        self.fiber: Fiber | None = None
        self.start()

    def run(self) -> None:
        while True:
            self.go.acquire()
            fiber = self.fiber
            assert fiber is not None  # set before
            _current.fiber = fiber
            fiber.execute()
            self.back.release()


_current = threading.local()
_idle: list[_Worker] = []
_active: dict[int, Fiber] = {}


class Fiber:
    """One piece of blocking code, and how far it is."""

    def __init__(self, code: Callable[[], Any], host: Any = None) -> None:
        """``host``: whose code it is."""
        self.host = host
        self._code = code
        self._worker = _idle.pop() if _idle else _Worker()
        self._worker.fiber = self
        self._answer: tuple[Any, BaseException | None] = (None, None)
        self._wanted: Routine | None = None
        self._abandoned = False
        self.ended = False
        self.result: Any = None
        self.error: BaseException | None = None
        _active[id(self)] = self

    def execute(self) -> None:
        """In the thread."""
        try:
            self.result = self._code()
        except BaseException as error:  # handed to the task that waits
            self.error = error
        self.ended = True

    def wait_for(self, routine: Routine) -> Any:
        """In the thread: what this sub-routine of the task returns, or raises."""
        if self._abandoned:
            raise AbandonedError
        self._wanted = routine
        self._worker.back.release()
        self._worker.go.acquire()
        value, error = self._answer
        if error is not None:
            raise error
        return value

    def resume(self, value: Any = None, error: BaseException | None = None) -> Routine | None:
        """Let the code go on; what it waits for then, or None at its end."""
        self._answer, self._wanted = (value, error), None
        worker = self._worker
        worker.go.release()
        worker.back.acquire()
        if self.ended:
            worker.fiber = None
            _idle.append(worker)
            _active.pop(id(self), None)
            return None
        return self._wanted

    def abandon(self) -> None:
        """End the code at the place where it waits."""
        if not self.ended:
            self._abandoned = True
            self.resume(error=AbandonedError())


def blocking(code: Callable[[], Any], host: Any = None) -> Routine:
    """Run this code as a sub-routine of the calling task. ``host``: whose code it is."""
    fiber = Fiber(code, host)
    try:
        wanted = fiber.resume()
        while wanted is not None:
            try:
                value = yield from wanted
            except Exception as error:
                wanted = fiber.resume(error=error)
            else:
                wanted = fiber.resume(value)
    finally:
        fiber.abandon()
    if fiber.error is not None:
        raise fiber.error
    return fiber.result


def current() -> Fiber | None:
    """The piece of code that calls this; None: it is the simulator itself."""
    return getattr(_current, "fiber", None)


def wait_for(routine: Routine) -> Any:
    """Called by the code: what this sub-routine returns, or raises."""
    fiber = current()
    assert fiber is not None, "not called by blocking code"
    return fiber.wait_for(routine)


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """Threads that take turns do so ten times faster on one core. At the end, none is left in the middle of code."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[os.getpid() % len(cores)]})
    try:
        yield
    finally:
        for fiber in [*_active.values()]:
            fiber.abandon()
        os.sched_setaffinity(0, cores)
