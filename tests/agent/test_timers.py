"""Timers of the agent's loop that coincide."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from elastic_agent.agent.timers import call_periodically

PERIOD_S = 0.2


async def times_of(first_after_s: float, offset_s: float = 0.0) -> list[float]:
    """When a callback is called that schedules itself again, three times."""
    loop = asyncio.get_running_loop()
    times: list[float] = []
    done = asyncio.Event()

    def callback() -> None:
        times.append(loop.time())
        if len(times) < 3:
            call_periodically(PERIOD_S, callback, offset_s=offset_s)
        else:
            done.set()

    await asyncio.sleep(first_after_s)
    call_periodically(PERIOD_S, callback, offset_s=offset_s)
    await done.wait()
    return times


def test_what_has_the_same_period_is_called_at_the_same_moment() -> None:
    async def story() -> tuple[list[asyncio.TimerHandle], float]:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        handles = []
        for _ in range(2):
            handles.append(call_periodically(60.0, lambda: None))
            await asyncio.sleep(0.001)
        handles.append(call_periodically(60.0, lambda: None, offset_s=0.5))
        return handles, now_s

    (first, second, later), now_s = asyncio.run(story())
    # Only if the middle of a period lies between the calls do they differ, by one period.
    assert (second.when() - first.when()) % 60.0 == pytest.approx(0.0, abs=1e-6)
    assert (later.when() - first.when()) % 60.0 == pytest.approx(0.5, abs=1e-6)
    assert 30.0 <= first.when() - now_s <= 90.1


def test_one_that_schedules_itself_again_is_called_once_each_period() -> None:
    times = asyncio.run(times_of(0.05))
    periods = [round(later / PERIOD_S) - round(earlier / PERIOD_S) for earlier, later in pairwise(times)]
    assert all(period >= 1 for period in periods), times
    assert times[-1] - times[0] >= 1.9 * PERIOD_S
