"""A blocking call beside the event loop, which is left behind when it does not come back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

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
    outcome = _begun(work)
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


def _begun(work: Callable[[], T]) -> Future[T]:
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # nobody cancels it any more

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    try:
        threading.Thread(target=run, name="store-call", daemon=True).start()
    except RuntimeError as error:
        raise StoreLostError(f"cannot start a thread ({error})") from None
    return outcome
