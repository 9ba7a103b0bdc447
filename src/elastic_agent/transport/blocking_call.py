"""Blocking calls beside the event loop: they are left behind when they do not come back, as the disk may hang, too."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from .base import StoreLostError

T = TypeVar("T")


async def run_abandonable(
    work: Callable[[], T], timeout_s: float, too_late: Callable[[T], None] = lambda result: None
) -> T:
    """Call what may take long (name look-ups, dialling, a disk) in a daemon thread of its own.

    Such a call can block past its own time-outs (a resolver, a network that drops packets silently). Whoever waits
    for it stops waiting at the time-out, or when cancelled; the thread ends when the call returns.

    Args:
        work: the call.
        timeout_s: how long to wait for it.
        too_late: called with a result for which nothing waits any more, in any thread: the loop may have ended.

    Raises:
        StoreLostError: it did not come back in time, or no thread can be started at present.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # nobody cancels it any more
    try:
        threading.Thread(target=_carry_out, args=(work, outcome), name="store-call", daemon=True).start()
    except RuntimeError as error:
        raise StoreLostError(f"cannot start a thread ({error})") from None
    answer = asyncio.wrap_future(outcome)

    def close_late(done: Future[T]) -> None:
        if done.exception() is None:
            too_late(done.result())

    try:
        await asyncio.wait([answer], timeout=timeout_s)
    except asyncio.CancelledError:
        outcome.add_done_callback(close_late)
        if not answer.cancel():
            answer.exception()  # or asyncio would log it
        raise
    if answer.done():
        return answer.result()
    outcome.add_done_callback(close_late)
    answer.cancel()
    raise StoreLostError(f"no answer within {timeout_s:g} s")


def _carry_out(work: Callable[[], T], outcome: Future[T]) -> None:
    try:
        result = work()
    except BaseException as error:
        outcome.set_exception(error)
    else:
        outcome.set_result(result)


DoNext = Callable[[], bool]
"""Carries out one call; returns whether another one waits."""


class DiskThread:
    """Carries out one call after the other, in a thread of its own that lives while there are any.

    Of the calls of one kind that still wait for the disk only the newest is carried out. May be used by several
    threads.
    """

    def __init__(self, name: str, start: Callable[[DoNext], object] | None = None) -> None:
        """``name``: of the thread; ``start``: has the waiting calls carried out elsewhere, without waiting for it."""
        self._name = name
        self._start = start or self._start_thread
        self._lock = threading.Lock()
        self._is_busy = False
        self._waiting: dict[str, tuple[Callable[[], Any], Future[Any]]] = {}
        self._late: Future[Any] | None = None
        """The last call that timed out; the disk hangs until it comes back."""

    def submit(self, kind: str, work: Callable[[], T]) -> Future[T]:
        """Queue ``work`` after earlier calls; it replaces a queued call of the same ``kind``.

        Returns:
            The outcome of the work, or of a newer one that takes its place. It cannot be cancelled.
        """
        with self._lock:
            _, outcome = self._waiting.pop(kind, (None, None))
            if outcome is None:
                outcome = Future()
                outcome.set_running_or_notify_cancel()
            self._waiting[kind] = work, outcome
            was_busy, self._is_busy = self._is_busy, True
        if not was_busy:
            try:
                self._start(self._do_next)
            except RuntimeError as error:  # this user can have no more threads at present
                self._fail(OSError(errno.EAGAIN, str(error)))
        return outcome

    async def call_async(self, kind: str, work: Callable[[], T], timeout_s: float) -> T:
        """Do the same, and wait for the result; not at all while an earlier call hangs.

        Raises:
            TimeoutError: it takes longer; it is done when the disk answers again.
            Exception: what ``work`` raised.
        """
        return await self.wait(self.submit(kind, work), timeout_s)

    async def wait(self, outcome: Future[T], timeout_s: float) -> T:
        """Return the result of a queued call; raises as :meth:`call_async` does."""
        answered = asyncio.wrap_future(outcome)
        try:
            hangs = self._late is not None and not self._late.done()
            await asyncio.wait([answered], timeout=0.0 if hangs else timeout_s)
            if answered.done():
                return answered.result()
        finally:
            if not answered.cancel():  # the call goes on
                answered.exception()  # or asyncio would log it
        if not outcome.done():
            self._late = outcome
            raise timed_out(timeout_s)
        return outcome.result()

    def _start_thread(self, do_next: DoNext) -> None:
        def work() -> None:
            while do_next():
                pass

        threading.Thread(target=work, name=self._name, daemon=True).start()

    def _fail(self, error: OSError) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            self._is_busy = False
        for _, outcome in waiting.values():
            outcome.set_exception(error)

    def _do_next(self) -> bool:
        with self._lock:
            kind = next(iter(self._waiting))
            work, outcome = self._waiting.pop(kind)
        _carry_out(work, outcome)
        with self._lock:
            self._is_busy = bool(self._waiting)
            return self._is_busy


def timed_out(timeout_s: float) -> TimeoutError:
    """Return the operating system's error for a disk that hangs."""
    return TimeoutError(errno.ETIMEDOUT, f"the disk did not answer within {timeout_s:g} s")
