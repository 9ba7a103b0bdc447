"""Tasks whose failure is logged and disturbs nothing else; calls from other threads, and waits with a limit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, ParamSpec

from elastic_agent.logs import get_logger

P = ParamSpec("P")


class BackgroundTasks:
    """Tasks of the event loop that nothing waits for."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def settle(self, timeout_s: float) -> None:
        """Wait until all have ended, also those that they start; not for longer than this."""
        until_s = asyncio.get_running_loop().time() + timeout_s
        while self._tasks and (left_s := until_s - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait(self._tasks, timeout=left_s)

    def cancel(self) -> None:
        """Give them up."""
        for task in self._tasks:
            task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            get_logger().error("internal error in the background; the run continues", exc_info=error)


def in_this_loop(call: Callable[P, object]) -> Callable[P, None]:
    """Return a function for other threads that has this one called in the present loop, as long as that runs."""
    loop = asyncio.get_running_loop()

    def call_soon(*args: P.args, **kwargs: P.kwargs) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the agent has ended
            loop.call_soon_threadsafe(partial(call, *args, **kwargs))

    return call_soon


async def wait_for(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for the event, not for longer than this."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
