"""An event loop in a thread of its own, for tests that make one call after the other."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


@functools.cache
def background_loop() -> asyncio.AbstractEventLoop:
    """The loop of this process; it runs until the process ends."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="test-loop", daemon=True).start()
    return loop


def in_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in that loop and wait for it."""
    return asyncio.run_coroutine_threadsafe(work, background_loop()).result()


def finished(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("it waits for something")


class Blocking:
    """An object of that loop: its coroutines and methods run there, while the calling thread waits."""

    def __init__(self, records: Any) -> None:
        self.records = records

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.records, name)
        if not callable(method):
            return method

        def call(*args: Any, **kwargs: Any) -> Any:
            async def made() -> Any:
                result = method(*args, **kwargs)
                return await result if inspect.isawaitable(result) else result

            return in_loop(made())

        return call
