"""Drivers in an asyncio loop, and blocking store calls that may never come back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from elastic_agent.transport import AbandonableThread, StoreLostError

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


async def call(
    thread: AbandonableThread,
    work: Callable[[], T],
    timeout_s: float,
    too_late: Callable[[T], None] = lambda result: None,
) -> T:
    """Run ``work`` in the thread; if it does not come back in time, leave the thread behind.

    ``too_late`` is called with a result for which nothing waits any more.

    Raises:
        StoreLostError: it did not come back; its outcome is unknown, the thread is of no use any more.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def came_back(done: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits any more
            loop.call_soon_threadsafe(_hand_over, done, answer, too_late)

    def give_up() -> None:
        thread.abandon()
        if not answer.done():
            answer.set_exception(StoreLostError(f"no answer within {timeout_s:g} s"))

    timer = loop.call_later(timeout_s, give_up)
    try:
        thread.submit(work).add_done_callback(came_back)
        return await answer
    finally:
        timer.cancel()


def _hand_over(done: Future[T], answer: asyncio.Future[T], too_late: Callable[[T], None]) -> None:
    """The waiting task may be gone by now (timed out, cancelled)."""
    if answer.done():
        if not done.cancelled() and done.exception() is None:
            too_late(done.result())
    elif done.cancelled():
        answer.set_exception(StoreLostError("the connection was abandoned"))
    elif (error := done.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(done.result())


async def run_abandonable(
    work: Callable[[], T], timeout_s: float, too_late: Callable[[T], None] = lambda result: None
) -> T:
    """Run something that may take long (name look-ups, dialling) in a thread of its own; see :func:`call`."""
    thread = AbandonableThread("store-call")
    try:
        return await call(thread, work, timeout_s, too_late)
    finally:
        thread.abandon()


async def until_one_ends(*work: Awaitable[None]) -> None:
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
