"""Awaiting blocking store calls that may never come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from elastic_agent.transport.base import StoreLostError
from elastic_agent.transport.lane import Lane

T = TypeVar("T")


async def call(lane: Lane, work: Callable[[], T], timeout_s: float) -> T:
    """Run ``work`` in the lane's thread; if it does not come back in time, leave the thread behind.

    Raises:
        StoreLostError: it did not come back; its outcome is unknown, the lane is of no use any more.
    """
    future: asyncio.Future[T] = asyncio.wrap_future(lane.submit(work))
    future.add_done_callback(_taken_note_of)
    done, _ = await asyncio.wait([future], timeout=timeout_s)
    if not done:
        lane.abandon()
        raise StoreLostError(f"no answer within {timeout_s:g} s")
    return future.result()


def _taken_note_of(future: asyncio.Future[T]) -> None:
    """Whoever waited may be gone by now (timed out, cancelled); then its error is nobody's."""
    if not future.cancelled():
        future.exception()


async def aside(work: Callable[[], T], timeout_s: float) -> T:
    """Run something that may take long (name look-ups, dialling) in a thread of its own."""
    lane = Lane("store-aside")
    try:
        return await call(lane, work, timeout_s)
    finally:
        lane.abandon()
