"""The grace period before a restart: it lasts as long as the workers make progress."""

from __future__ import annotations

import signal
from textwrap import dedent

import pytest

from elastic_agent.workers.guard.client import Exited, Launch, Stopped
from tests.workers.support import TELL, Driver, News, python

LONG_S = 1000.0
IDLE_S = 0.05

SAVE = f"""{TELL}
import subprocess, threading

def save(*_):
    exec(sys.argv[2])
    tell("saved")
    os._exit(5)

signal.signal(signal.SIGTERM, save)
"""
"""A worker whose handler runs the code in its second argument."""

BLOCKED = """
lock = threading.Lock()
lock.acquire()
tell("ready")
while True:
    lock.acquire()
"""


def saving(news: News, handler: str, body: str = BLOCKED) -> Launch:
    return python(0, SAVE + body, str(news.path), dedent(handler))


def stop(driver: Driver, news: News, launch: Launch, grace_s: float = LONG_S) -> Exited:
    """Start the worker, wait until it is ready, stop it; returns how it ended."""
    driver.guard.spawn(1, [launch])
    assert news.line() == "ready"
    driver.guard.stop(grace_s, idle_s=IDLE_S)
    exited = driver.until(Exited)
    driver.until(Stopped)
    return exited


WRITES = "open(sys.argv[1] + '.state', 'wb').write(bytes(10_000_000))"
COMPUTES = "ends = time.monotonic() + 0.3\nwhile time.monotonic() < ends:\n    pass"
SAVES = {
    "writes a file": WRITES,
    "waits for a thread that computes": f"""
        thread = threading.Thread(target=exec, args=({COMPUTES!r}, globals()))
        thread.start()
        thread.join()
    """,
    "waits for a thread that waits for a child process": f"""
        computes = [sys.executable, "-S", "-c", {"import time; " + COMPUTES!r}]
        thread = threading.Thread(target=lambda: subprocess.run(computes))
        thread.start()
        thread.join()
    """,
}
WAITS_FOR_A_LOCK = "threading.Semaphore(0).acquire()"
HANGS = {
    "waits for a lock": WAITS_FOR_A_LOCK,
    "waits for a thread that waits for a lock": """
        thread = threading.Thread(target=threading.Semaphore(0).acquire)
        thread.start()
        thread.join()
    """,
}
"""With one thread, they are judged by the same rules as in `test_progress.py`, where the clock is the test's."""


@pytest.mark.parametrize("handler", SAVES.values(), ids=SAVES)
def test_a_handler_that_saves_may_complete(driver: Driver, news: News, handler: str) -> None:
    assert stop(driver, news, saving(news, handler)).returncode == 5
    assert news.line() == "saved"


@pytest.mark.parametrize("handler", HANGS.values(), ids=HANGS)
def test_a_handler_that_hangs_is_killed(driver: Driver, news: News, handler: str) -> None:
    assert stop(driver, news, saving(news, handler)).returncode == -signal.SIGKILL


def test_a_worker_that_ignores_the_signal_is_killed_whatever_it_does(driver: Driver, news: News) -> None:
    body = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        tell("ready")
        while True:
            open("/dev/null", "wb").write(bytes(1_000_000))
    """
    launch = python(0, SAVE + dedent(body), str(news.path), "")
    assert stop(driver, news, launch).returncode == -signal.SIGKILL


def test_a_child_that_goes_on_as_before_does_not_count(driver: Driver, news: News) -> None:
    """As the processes of a data loader, which get no signal as long as their worker runs."""
    body = """
        if os.fork() == 0:
            while True:
                open("/dev/null", "wb").write(bytes(1_000_000))
        time.sleep(2 / os.sysconf("SC_CLK_TCK"))  # until /proc shows that the child is older than the signal
        signal.signal(signal.SIGTERM, lambda *_: None)
    """
    launch = python(0, SAVE + dedent(body) + BLOCKED, str(news.path), "")
    assert stop(driver, news, launch).returncode == -signal.SIGKILL


def test_a_child_that_saves_on_sigterm_after_its_worker_has_ended_may_complete(
    driver: Driver, news: News
) -> None:
    body = """
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.fork() == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            tell("ready")
            signal.sigwait([signal.SIGTERM])
            save()
        time.sleep(1000)
    """
    launch = saving(news, WRITES, dedent(body))
    assert stop(driver, news, launch).returncode == -signal.SIGTERM
    assert news.line() == "saved"


def test_a_worker_that_hangs_does_not_end_the_grace_period_of_one_that_saves(
    driver: Driver, news: News
) -> None:
    hangs = python(1, SAVE + BLOCKED, str(news.path), WAITS_FOR_A_LOCK)
    driver.guard.spawn(1, [saving(news, COMPUTES), hangs])
    assert [news.line(), news.line()] == ["ready", "ready"]
    driver.guard.stop(LONG_S, idle_s=IDLE_S)
    driver.until(Stopped)
    assert {exited.slot: exited.returncode for exited in driver.of(Exited)} == {0: 5, 1: -signal.SIGKILL}


def test_the_grace_period_remains_the_limit(driver: Driver, news: News) -> None:
    handler = "while True:\n    open('/dev/null', 'wb').write(bytes(1_000_000))"
    assert stop(driver, news, saving(news, handler), grace_s=0.3).returncode == -signal.SIGKILL
