"""Using a disk that may hang: a state directory is often a home directory on a file server."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from elastic_agent.transport import AbandonableThread

T = TypeVar("T")


class Thread(Protocol):
    """Carries out what is submitted, one after the other."""

    def submit(self, work: Callable[[], None]) -> object: ...


class DiskThread:
    """Carries out one call after the other, in a thread of its own that starts with the first one.

    Of the calls of one kind that still wait for the disk only the newest is carried out. May be used by several
    threads.
    """

    def __init__(self, name: str, new_thread: Callable[[str], Thread] = AbandonableThread) -> None:
        """``name``: of the thread; ``new_thread``: starts it."""
        self._name = name
        self._new_thread = new_thread
        self._lock = threading.Lock()
        self._thread: Thread | None = None
        self._waiting: dict[str, tuple[Callable[[], Any], Future[Any]]] = {}
        self._hangs = False
        """A call timed out and has not come back yet."""

    def submit(self, kind: str, work: Callable[[], T]) -> Future[T]:
        """Queue ``work`` after earlier calls; it replaces a queued call of the same ``kind``.

        Returns:
            The outcome of the work, or of a newer one that takes its place. It cannot be cancelled.
        """
        with self._lock:
            _, outcome = self._waiting.pop(kind, (None, None))
            replaces = outcome is not None
            if outcome is None:
                outcome = Future()
                outcome.set_running_or_notify_cancel()
            self._waiting[kind] = work, outcome
            if self._thread is None:
                self._thread = self._new_thread(self._name)
            if not replaces:
                self._thread.submit(self._do_next)
        return outcome

    def call(self, kind: str, work: Callable[[], T], timeout_s: float) -> T:
        """The same, and wait for the result; not at all while an earlier call hangs.

        Raises:
            TimeoutError: it takes longer; it is done when the disk answers again.
            Exception: what ``work`` raised.
        """
        return self.wait(self.submit(kind, work), timeout_s)

    def wait(self, outcome: Future[T], timeout_s: float) -> T:
        """Return the result of a queued call; raises as :meth:`call` does."""
        try:
            return outcome.result(0.0 if self._hangs else timeout_s)
        except TimeoutError:
            with self._lock:
                self._hangs = not outcome.done()
            if self._hangs:
                raise timed_out(timeout_s) from None
            return outcome.result()  # it was just late, or the time-out is the work's own

    async def call_async(self, kind: str, work: Callable[[], T], timeout_s: float) -> T:
        """The same for a caller in an asyncio loop, which keeps running."""
        outcome = asyncio.wrap_future(self.submit(kind, work))
        done, _ = await asyncio.wait([outcome], timeout=timeout_s)
        if not done:
            # It was reported already.
            outcome.add_done_callback(lambda late: late.cancelled() or late.exception())
            raise timed_out(timeout_s)
        return outcome.result()

    def _do_next(self) -> None:
        with self._lock:
            kind = next(iter(self._waiting))
            work, outcome = self._waiting.pop(kind)
        try:
            result = work()
        except Exception as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)
        with self._lock:
            self._hangs = False


def timed_out(timeout_s: float) -> TimeoutError:
    """The disk hangs, as an error of the operating system."""
    return TimeoutError(errno.ETIMEDOUT, f"the disk did not answer within {timeout_s:g} s")
