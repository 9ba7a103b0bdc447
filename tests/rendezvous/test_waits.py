"""The ways in which drivers wait in an agent."""

from __future__ import annotations

import asyncio
from itertools import islice

import pytest

from elastic_agent.rendezvous.waits import Waits, back_offs, until_one_ends

from .support import PATIENCE_S, run


def test_a_signal_that_was_set_before_the_wait_is_not_lost_and_counts_once() -> None:
    async def story() -> None:
        signal = Waits().signal()
        signal.set()
        assert await signal.wait(PATIENCE_S)
        assert not await signal.wait(0.0)

    run(story())


def test_when_one_part_fails_the_others_are_cancelled_and_its_error_is_raised() -> None:
    cancelled: list[str] = []

    async def go_on() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append("the other")
            raise

    async def fail() -> None:
        await asyncio.sleep(0)
        raise OSError("no space left on device")

    async def story() -> None:
        with pytest.raises(OSError, match="no space left"):
            await until_one_ends(go_on(), fail())

    run(story())
    assert cancelled == ["the other"]


def test_back_offs_double_up_to_the_longest() -> None:
    assert [*islice(back_offs(0.5, 3.0), 5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert next(islice(back_offs(0.5, 3.0), 5000, None)) == 3.0
