"""Stopping a generation: a signal, some grace, then SIGKILL, and nothing left of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent import linux
from elastic_agent.linux import boottime_s
from elastic_agent.workers.guard.client import Exited, Guard, Launch, Spawned, Stopped
from tests.workers.support import (
    FAMILY,
    PATIENCE_S,
    SLEEP,
    Driver,
    News,
    StandIn,
    daemonising,
    deaf,
    program,
    python,
    watching,
)

LONG_S = 1000.0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_signal_of_a_stop_ends_workers_at_once(driver: Driver, signum: signal.Signals) -> None:
    driver.guard.spawn(2, [program(0, *SLEEP), program(1, *SLEEP)])
    driver.until(Spawned)
    driver.guard.stop(LONG_S, signum)
    assert driver.until(Stopped) == Stopped(2, ())
    ends = {(event.slot, event.returncode, event.stopping) for event in driver.of(Exited)}
    assert ends == {(0, -signum, True), (1, -signum, True)}


@pytest.mark.parametrize("graces_s", [(0.3,), (LONG_S, 0.0)], ids=["as it was", "shortened"])
def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace_period(
    driver: Driver, news: News, graces_s: tuple[float, ...]
) -> None:
    driver.guard.spawn(1, [deaf(0, news)])
    assert news.line() == "deaf"
    for grace_s in graces_s:
        driver.guard.stop(grace_s)
    assert driver.until(Exited).returncode == -signal.SIGKILL
    driver.until(Stopped)


@pytest.mark.parametrize(
    ("signum", "worker", "told"),
    [
        (signal.SIGTERM, "handles", ["worker SIGTERM", "worker ends", "child SIGTERM"]),
        (signal.SIGTERM, "does nothing", ["child SIGTERM"]),
        (signal.SIGTERM, "ignores", ["child SIGTERM"]),
        (signal.SIGINT, "handles", ["child SIGINT", "worker SIGINT", "worker ends", "child SIGTERM"]),
        (signal.SIGINT, "does nothing", ["child SIGINT", "child SIGTERM"]),
    ],
)
def test_children_get_sigterm_when_their_worker_has_ended_and_sigint_with_it(
    driver: Driver, news: News, signum: signal.Signals, worker: str, told: list[str]
) -> None:
    driver.guard.spawn(1, [python(0, FAMILY, str(news.path), worker)])
    assert news.line() == "ready"
    driver.guard.stop(LONG_S, signum)
    if worker == "ignores":
        os.kill(driver.until(Spawned).pids[0], signal.SIGKILL)
    driver.until(Exited)
    found = [news.line() for _ in told]
    assert (sorted(found[:2]) + found[2:] if signum == signal.SIGINT and len(told) > 2 else found) == told
    driver.stop()
    assert news.silent()


def test_a_daemonised_grandchild_gets_the_grace_period_too(driver: Driver, news: News) -> None:
    daemon_code = "import signal; signal.signal(signal.SIGTERM, lambda *_: (tell('asked'), os._exit(0)))"
    driver.guard.spawn(1, [daemonising(0, news, daemon=daemon_code)])
    with watching(int(news.line())):
        driver.stop(LONG_S)
        assert news.line() == "asked"


LEFT_IN_ITS_GROUP = """
import os, sys, time
if os.fork():
    os._exit(0)
open(sys.argv[1], "w").write(f"{os.getpid()}\\n")
time.sleep(1000)
"""


@pytest.mark.parametrize("is_daemon", [True, False], ids=["daemonised", "in its group"])
def test_processes_left_by_exited_workers_are_stopped(driver: Driver, news: News, is_daemon: bool) -> None:
    in_group = python(0, LEFT_IN_ITS_GROUP, str(news.path))
    driver.guard.spawn(1, [daemonising(0, news, worker="sys.exit(0)") if is_daemon else in_group])
    with watching(int(news.line())) as (left,):
        assert driver.until(Exited).returncode == 0
        assert not left.ended(0)
        assert driver.stop(LONG_S) == Stopped(1, ())
        assert left.ended(0)


def test_a_process_whose_first_thread_has_ended_is_still_found(driver: Driver, news: News) -> None:
    """It looks like a zombie in /proc, and runs."""
    daemon_code = """
        import ctypes, threading
        threading.Thread(target=lambda: (tell(os.getpid()), time.sleep(1000))).start()
        ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
    """
    driver.guard.spawn(1, [daemonising(0, news, daemon=daemon_code)])
    with watching(int(news.line())) as (daemon,):
        assert daemon.pid in {process.pid for process in linux.descendants(driver.guard.pid)}
        driver.stop()
        assert daemon.ended(0)


def test_a_process_tree_that_keeps_forking_is_killed(driver: Driver, news: News) -> None:
    code = """
        import os, sys, time
        open(sys.argv[1], "w").write(f"{os.getpid()}\\n")
        end = time.monotonic() + 60  # in case a test run that is killed leaves it behind
        while time.monotonic() < end:  # each generation daemonises the next, and dies
            if os.fork():
                os._exit(0)
            os.setsid()
            time.sleep(0.001)
    """
    driver.guard.spawn(1, [python(0, code, str(news.path))])
    news.line()
    driver.until(Exited)
    assert driver.stop() == Stopped(1, ())
    assert not linux.descendants(driver.guard.pid)


def test_stopping_an_empty_generation_completes_at_once(driver: Driver) -> None:
    assert driver.stop(LONG_S) == Stopped(0, ())
    driver.guard.spawn(7, [program(0, "true")])
    driver.until(Exited)
    assert driver.stop(LONG_S) == Stopped(7, ())
    assert driver.stop(LONG_S) == Stopped(7, ())


def test_stopping_while_starting_leaves_no_processes(driver: Driver) -> None:
    driver.guard.spawn(1, [program(slot, *SLEEP) for slot in range(4)])
    driver.stop(LONG_S)
    assert not linux.descendants(driver.guard.pid)


def test_signals_for_the_whole_service_do_not_end_the_guard(driver: Driver) -> None:
    driver.guard.spawn(1, [program(0, *SLEEP)])
    pid = driver.until(Spawned).pids[0]
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        os.kill(driver.guard.pid, signum)
    os.kill(pid, signal.SIGTERM)
    assert driver.until(Exited).returncode == -signal.SIGTERM


def test_generations_leave_no_descriptor_and_no_process(agent: StandIn, news: News) -> None:
    def descriptors() -> list[int]:
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (agent.guard_pid, agent.pid)]

    def cycle(generation: int) -> None:
        broken = [Launch(2, ("/no/such",), {})] if generation % 5 == 4 else []
        agent.start(daemonising(0, news), program(1, *SLEEP), *broken, generation=generation)
        if not broken:
            agent.until("Spawned")
            news.line()
        agent.stop(LONG_S if generation % 2 else 0.0)

    cycle(0)
    before = descriptors()
    for generation in range(1, 11):
        cycle(generation)
    assert descriptors() == before
    assert not linux.descendants(agent.guard_pid)
    assert not linux.dead_children(agent.guard_pid)


def test_close_ends_the_guard_and_all_its_processes(news: News) -> None:
    guard = Guard.start()
    guard.set_deadline(boottime_s() + 1000)
    driver = Driver(guard)
    guard.spawn(1, [daemonising(0, news)])
    daemon = int(news.line())
    with watching(guard.pid, daemon, driver.until(Spawned).pids[0]) as watched:
        guard.close(PATIENCE_S)
        assert all(process.ended(0) for process in watched)
    guard.close()


@pytest.fixture
def freezer() -> Iterator[Path]:
    """Make a control group (version 1) whose processes sleep in the kernel, deaf to SIGKILL, until thawed."""
    path = Path("/sys/fs/cgroup/freezer", f"elastic-agent-test-{os.getpid()}")
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no freezer control group of version 1 here: {error}")
    yield path
    (path / "freezer.state").write_text("THAWED")
    for _ in range(1000):
        try:
            path.rmdir()
            return
        except OSError:
            time.sleep(0.01)  # its processes are being torn down, which nothing announces


@pytest.mark.prove
def test_a_process_stuck_in_the_kernel_does_not_delay_the_others(freezer: Path) -> None:
    guard = Guard.start(kill_patience_s=1.0)
    guard.set_deadline(boottime_s() + 1000)
    driver = Driver(guard)
    driver.guard.spawn(1, [program(0, *SLEEP), program(1, *SLEEP)])
    frozen = driver.until(Spawned).pids[1]
    (freezer / "cgroup.procs").write_text(str(frozen))
    (freezer / "freezer.state").write_text("FROZEN")
    assert driver.stop(0.1) == Stopped(1, (frozen,))
    assert [event.slot for event in driver.of(Exited)] == [0]
    driver.guard.spawn(2, [program(0, *SLEEP)])
    driver.until(Spawned)
    assert driver.stop(LONG_S) == Stopped(2, ())  # it is not waited for again
    with watching(frozen) as (process,):
        (freezer / "freezer.state").write_text("THAWED")
        assert process.ended()
    guard.close()
