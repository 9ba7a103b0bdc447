"""Blocking calls that can be left behind, and calls to a disk that hangs."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from elastic_agent.transport import StoreLostError, run_abandonable
from elastic_agent.transport.blocking_call import DiskThread, DoNext
from tests.loop_thread import Blocking
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


# -- a disk: waits are short, and the newest call is carried out when it is back ---------------------


class Disk:
    """What was written; each write waits while the disk hangs."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.answers = threading.Event()
        self.asked = threading.Event()

    def write(self, what: str) -> None:
        self.asked.set()
        assert self.answers.wait(GUARD_S)
        self.written.append(what)


@pytest.fixture
def disk() -> Iterator[Disk]:
    opened = Disk()
    yield opened
    opened.answers.set()


@pytest.fixture
def thread() -> Any:
    return Blocking(DiskThread("disk"))


def test_a_hanging_call_is_waited_for_once_and_completed_when_the_disk_is_back(
    disk: Disk, thread: Any
) -> None:
    with pytest.raises(TimeoutError, match=r"the disk did not answer within 0\.1 s"):
        thread.call_async("history", lambda: disk.write("1"), 0.1)
    for number in "234":
        with pytest.raises(TimeoutError):
            thread.call_async("history", lambda number=number: disk.write(number), GUARD_S)
    disk.answers.set()
    thread.submit("other", lambda: None).result(GUARD_S)  # until the calls before it have come back
    assert disk.written == ["1", "4"], "what was overtaken while it waited is left out"
    thread.call_async("history", lambda: disk.write("5"), GUARD_S)
    assert disk.written[-1] == "5", "it is waited for again"


def test_a_replaced_call_gets_the_result_of_the_newer_one(disk: Disk, thread: Any) -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, "no space left")

    thread.submit("other", lambda: disk.write("other"))
    assert disk.asked.wait(GUARD_S)
    outcomes = [thread.submit("history", lambda: disk.write("1")), thread.submit("history", fail)]
    disk.answers.set()
    for outcome in outcomes:
        with pytest.raises(OSError, match="no space left"):
            outcome.result(GUARD_S)
    assert disk.written == ["other"]


def test_a_time_out_that_the_disk_reports_is_not_taken_for_a_hang(thread: Any) -> None:
    def fail() -> None:
        raise TimeoutError(errno.ETIMEDOUT, "connection to the server timed out")

    for _ in range(2):
        with pytest.raises(TimeoutError, match="connection to the server"):
            thread.call_async("history", fail, GUARD_S)


def test_calls_fail_while_no_thread_can_be_started_and_are_done_when_one_can(disk: Disk) -> None:
    can_start = False

    def start(do_next: DoNext) -> None:
        if not can_start:
            raise RuntimeError("can't start new thread")
        do_next()

    thread = DiskThread("disk", start)
    disk.answers.set()
    for number in "12":
        with pytest.raises(OSError, match="can't start new thread"):
            thread.submit("history", lambda number=number: disk.write(number)).result(GUARD_S)
    can_start = True
    thread.submit("history", lambda: disk.write("3")).result(GUARD_S)
    assert disk.written == ["3"]
