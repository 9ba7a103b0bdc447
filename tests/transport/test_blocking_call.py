"""A blocking call that can be left behind."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest

from elastic_agent.transport import StoreLostError, run_abandonable
from tests.waiting import GUARD_S


class Stuck:
    """A call that comes back when a test lets it."""

    def __init__(self) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.goes_on.wait(GUARD_S)
        return "late"


def test_the_result_or_the_exception_is_that_of_the_call() -> None:
    def refuse() -> None:
        raise TimeoutError("its own")

    async def story() -> None:
        assert await run_abandonable(lambda: 1, GUARD_S) == 1
        with pytest.raises(TimeoutError, match="its own"):
            await run_abandonable(refuse, GUARD_S)

    asyncio.run(story())


def test_a_call_that_does_not_come_back_in_time_is_left_behind_and_its_result_released() -> None:
    async def story() -> None:
        stuck, released = Stuck(), Future[str]()
        with pytest.raises(StoreLostError, match=r"no answer within 0\.01 s"):
            await run_abandonable(stuck, 0.01, released.set_result)
        stuck.goes_on.set()
        assert await asyncio.wrap_future(released) == "late"

    asyncio.run(story())


def test_the_result_of_a_call_that_nobody_waits_for_any_more_is_released() -> None:
    async def story() -> None:
        waiting = asyncio.create_task(run_abandonable(stuck, GUARD_S, released.set_result))
        await asyncio.to_thread(stuck.begun.wait, GUARD_S)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    stuck, released = Stuck(), Future[str]()
    asyncio.run(story())
    stuck.goes_on.set()
    assert released.result(GUARD_S) == "late", "though the loop has ended"


def test_a_process_that_can_have_no_more_threads_loses_the_store_and_not_its_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(StoreLostError, match="can't start new thread"):
        asyncio.run(run_abandonable(lambda: 1, GUARD_S))
