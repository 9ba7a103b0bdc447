"""A thread that can be left behind."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from elastic_agent.transport.abandonable_thread import AbandonableThread
from tests.waiting import GUARD_S as PATIENCE_S


def test_calls_are_made_one_after_the_other() -> None:
    abandonable = AbandonableThread("lane")
    done: list[int] = []
    futures = [abandonable.submit(lambda i=i: done.append(i)) for i in range(100)]
    futures[-1].result(PATIENCE_S)
    assert done == list(range(100))
    abandonable.abandon()


def test_an_exception_is_raised_in_the_caller() -> None:
    abandonable = AbandonableThread("lane")
    with pytest.raises(ZeroDivisionError):
        abandonable.submit(lambda: 1 // 0).result(PATIENCE_S)
    assert abandonable.submit(lambda: 1).result(PATIENCE_S) == 1
    abandonable.abandon()


def test_an_abandoned_thread_starts_no_calls_and_ends_with_its_call() -> None:
    abandonable = AbandonableThread("left-behind")
    begun, go_on = threading.Event(), threading.Event()
    started: list[str] = []

    def stuck() -> str:
        begun.set()
        go_on.wait(PATIENCE_S)
        return "late"

    first = abandonable.submit(stuck)
    queued = abandonable.submit(lambda: started.append("queued"))
    assert begun.wait(PATIENCE_S)
    thread = next(one for one in threading.enumerate() if one.name == "left-behind")
    abandonable.abandon()
    after = abandonable.submit(lambda: started.append("after"))
    assert not first.done()
    with pytest.raises(CancelledError):
        after.result(PATIENCE_S)
    go_on.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    with pytest.raises(CancelledError):
        queued.result(PATIENCE_S)
    assert started == []
    assert first.result(0) == "late"
