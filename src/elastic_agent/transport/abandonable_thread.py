"""A thread for blocking calls, which can be left behind when a call does not come back."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class AbandonableThread:
    """Runs what it is given one after the other, in a daemon thread of its own.

    A store call can block past its own time-out (by 25 s and more if the network drops packets silently); its
    caller must be able to stop waiting. :meth:`abandon` leaves the thread behind: it ends when its call returns,
    and queued calls are cancelled.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._abandoned = False
        self._lock = threading.Lock()  # or a call could be queued behind the end
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have ``work`` called; the future carries its result or its exception."""
        future: Future[T] = Future()
        with self._lock:
            if self._abandoned:
                future.cancel()
            else:
                self._queue.put((future, work))
        return future

    def abandon(self) -> None:
        """Take no more calls and wait for none."""
        with self._lock:
            self._abandoned = True
            self._queue.put(None)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            future, work = job
            if self._abandoned or not future.set_running_or_notify_cancel():
                future.cancel()
                continue
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del job, future, work  # an idle thread keeps nothing alive
