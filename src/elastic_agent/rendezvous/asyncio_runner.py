"""Drivers in an asyncio loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from elastic_agent.transport import StoreLostError

from .effects import Effect, Steps, T


async def run_async(steps: Steps[T], perform: Callable[[Effect[Any]], Awaitable[Any]]) -> T:
    """Run a driver to its end in this task; closes it if the task is cancelled.

    Args:
        steps: the driver.
        perform: performs one effect: returns the answer, or raises its error.
    """
    try:
        effect = next(steps)
        while True:
            try:
                answer = await perform(effect)
            except Exception as error:
                effect = steps.throw(error)
            else:
                effect = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


async def in_time(work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Await the answer of a store.

    Raises:
        StoreLostError: there is none in time; whether the request was carried out is not known.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError:
        raise StoreLostError(f"no answer within {timeout_s:g} s") from None


async def until_one_ends(*work: Awaitable[object]) -> None:
    """Do all of this at once until one of it ends; the rest is cancelled. Raises what that one raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        left = [task for task in tasks if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # retrieved, or asyncio would log it
