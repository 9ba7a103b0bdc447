"""Means by which drivers wait: in asyncio, as an agent does; the simulator runs the same drivers in virtual time.

A driver (a node's session, the coordinator of a run, an election) is coroutines over connections that it is given.
Where it lets time pass in any other way than by calling one of these, it asks its :class:`Waits`. So the simulator can
stop or kill the driver's process wherever the driver waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Coroutine, Iterator
from typing import Any, TypeVar

from tenacity import RetryCallState, Retrying, wait_exponential

from elastic_agent.transport import StoreLostError

T = TypeVar("T")


class Signal:
    """A flag that one part of a driver, or its owner, sets and another part waits for; a set before the wait is not
    lost.

    One part waits for it at a time.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Wake the part that waits, or that will wait next."""
        self._event.set()

    def take(self) -> bool:
        """Return whether it was set; it is not any more."""
        was_set = self._event.is_set()
        self._event.clear()
        return was_set

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set, and clear it; False if that takes longer than the time-out."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        return self.take()


class Waits:
    """The ways in which a driver lets time pass."""

    def signal(self) -> Signal:
        """Return a new signal, whose wait is another one of these ways."""
        return Signal()

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""
        await asyncio.sleep(seconds)

    async def back_off(self, most_s: float) -> None:
        """Let a random time pass before another attempt: others may be attempting the same."""
        await asyncio.sleep(random.uniform(0.0, most_s))

    async def in_time(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Await the answer of a store; see :func:`in_time`."""
        return await in_time(work, timeout_s)

    async def until_one_ends(self, *parts: Coroutine[Any, Any, None]) -> None:
        """Run parts of a driver side by side; see :func:`until_one_ends`."""
        await until_one_ends(*parts)


def back_offs(first_s: float, most_s: float) -> Iterator[float]:
    """Return how long to wait at most after the first failed attempt, after the second one and so on.

    Tenacity's strategy without its loop, which sleeps and draws random numbers: here both are part of :class:`Waits`.
    """
    wait = wait_exponential(multiplier=first_s, max=most_s)
    attempts = RetryCallState(Retrying(), None, (), {})
    while True:
        yield wait(attempts)
        attempts.attempt_number += 1


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
    tasks = [asyncio.ensure_future(part) for part in work]
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
