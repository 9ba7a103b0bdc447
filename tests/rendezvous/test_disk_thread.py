"""Calls to a disk that hangs: waits are short, and the newest call is carried out when the disk is back."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from elastic_agent.transport.blocking_call import DiskThread, DoNext
from tests.loop_thread import Blocking

PATIENCE_S = 300.0


class Disk:
    """What was written; each write waits while the disk hangs."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.answers = threading.Event()
        self.asked = threading.Event()

    def write(self, what: str) -> None:
        self.asked.set()
        assert self.answers.wait(PATIENCE_S)
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
            thread.call_async("history", lambda number=number: disk.write(number), PATIENCE_S)
    disk.answers.set()
    thread.submit("other", lambda: None).result(PATIENCE_S)  # until the calls before it have come back
    assert disk.written == ["1", "4"], "what was overtaken while it waited is left out"
    thread.call_async("history", lambda: disk.write("5"), PATIENCE_S)
    assert disk.written[-1] == "5", "it is waited for again"


def test_a_replaced_call_gets_the_result_of_the_newer_one(disk: Disk, thread: Any) -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, "no space left")

    thread.submit("other", lambda: disk.write("other"))
    assert disk.asked.wait(PATIENCE_S)
    outcomes = [thread.submit("history", lambda: disk.write("1")), thread.submit("history", fail)]
    disk.answers.set()
    for outcome in outcomes:
        with pytest.raises(OSError, match="no space left"):
            outcome.result(PATIENCE_S)
    assert disk.written == ["other"]


def test_a_time_out_that_the_disk_reports_is_not_taken_for_a_hang(thread: Any) -> None:
    def fail() -> None:
        raise TimeoutError(errno.ETIMEDOUT, "connection to the server timed out")

    for _ in range(2):
        with pytest.raises(TimeoutError, match="connection to the server"):
            thread.call_async("history", fail, PATIENCE_S)


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
            thread.submit("history", lambda number=number: disk.write(number)).result(PATIENCE_S)
    can_start = True
    thread.submit("history", lambda: disk.write("3")).result(PATIENCE_S)
    assert disk.written == ["3"]
