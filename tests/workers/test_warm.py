"""Warm workers: forked from a spawner that has imported everything, and otherwise like any other."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_agent import linux
from elastic_agent.linux import boottime_s
from elastic_agent.testing.processes import freeze
from elastic_agent.workers.guard.client import (
    Cold,
    Exited,
    Guard,
    Launch,
    Spawned,
    SpawnerConfig,
    SpawnerDied,
    SpawnFailed,
    Stopped,
    Warm,
    WarmLate,
)
from tests.waiting import wait_for
from tests.workers.support import DAEMONISE, PATIENCE_S, Driver, News, watching

REPORT = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY)
how = "warm" if any(type(finder).__name__ == "Preloaded" for finder in sys.meta_path) else "cold"
os.write(fd, (" ".join([how, str(os.getpid()), *sys.argv[2:]]) + "\\n").encode())
os.close(fd)
"""
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
STAY = "import time\ntime.sleep(1000)\n"


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[Driver]:
    """Run a guard with a spawner and two standbys, asked for but perhaps not there yet."""
    guard = Guard.start(kill_patience_s=PATIENCE_S)
    guard.set_deadline(boottime_s() + 1000)
    keep_warm(guard, tmp_path)
    yield Driver(guard)
    guard.close(PATIENCE_S)


def keep_warm(guard: Guard, folder: Path, *preload: str, standbys: int = 2) -> None:
    guard.keep_warm(SpawnerConfig(sys.executable, str(folder), preload, ENVIRONMENT, standbys))


def script(folder: Path, news: News, body: str, *args: str, slot: int = 0) -> Launch:
    """Return a warm worker that reports "warm" (or "cold"), its pid and its arguments to `news`, then runs `body`."""
    path = folder / f"script{slot}.py"
    path.write_text(REPORT + body)
    env = {**os.environ, **ENVIRONMENT}
    return Launch(slot, (sys.executable, "-u", str(path), str(news.path), *args), env, warm=True)


def spawn(driver: Driver, generation: int, *launches: Launch) -> None:
    """Start workers, warm however long that takes."""
    driver.guard.spawn(generation, launches, warm_patience_s=PATIENCE_S)


def staying(
    driver: Driver, generation: int, folder: Path, news: News, count: int = 1
) -> tuple[set[int], set[str]]:
    """Start workers that stay; return their pids, and how they were started: "warm" or "cold"."""
    spawn(driver, generation, *(script(folder, news, STAY, slot=slot) for slot in range(count)))
    pids = {*driver.until(Spawned).pids.values()}
    return pids, {news.line().split()[0] for _ in pids}


def test_every_generation_is_forked_from_the_spawner(warm: Driver, tmp_path: Path, news: News) -> None:
    for generation in (1, 2, 3):
        launches = [script(tmp_path, news, STAY, "a b", slot=slot) for slot in (0, 1)]
        spawn(warm, generation, *launches)
        pids = warm.until(Spawned).pids
        said = sorted(news.line() for _ in pids)
        assert said == sorted(f"warm {pid} a b" for pid in pids.values())
        with watching(*pids.values()) as workers:
            assert warm.stop().unkillable == ()
            assert all(worker.ended() for worker in workers)
    assert len(warm.of(Warm)) == 1


def test_a_killed_spawner_does_not_affect_workers_and_is_replaced(
    warm: Driver, tmp_path: Path, news: News
) -> None:
    (pid,), _ = staying(warm, 1, tmp_path, news)
    os.kill(spawner_of(warm.guard.pid), signal.SIGKILL)
    assert warm.until(SpawnerDied).how == "signal 9"
    with watching(pid) as (worker,):
        warm.until(Warm)
        assert not worker.ended(0)
        warm.stop()
    assert staying(warm, 2, tmp_path, news, 4)[1] == {"warm"}
    warm.stop()


@pytest.mark.prove
def test_a_killed_standby_is_not_used(warm: Driver, tmp_path: Path, news: News) -> None:
    warm.until(Warm)
    staying(warm, 1, tmp_path, news)
    warm.stop()
    standbys = standbys_of(warm.guard.pid)
    with watching(*standbys) as processes:
        for pid in standbys:
            os.kill(pid, signal.SIGKILL)
        assert all(process.ended() for process in processes)
    assert staying(warm, 2, tmp_path, news, 2)[1] == {"warm"}
    assert warm.of(Exited)[1:] == []
    warm.stop()


@pytest.mark.prove
def test_signals_for_the_whole_job_end_neither_the_spawner_nor_its_standbys(
    warm: Driver, tmp_path: Path, news: News
) -> None:
    """Nor do they reach the workers that standbys become later."""
    signums = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGRTMIN)
    warm.until(Warm)
    standbys = await_standbys(warm.guard.pid)
    for signum in signums:
        for pid in (*standbys, spawner_of(warm.guard.pid)):
            os.kill(pid, signum)
    pids, kinds = staying(warm, 1, tmp_path, news, 4)
    assert standbys < pids
    assert kinds == {"warm"}
    assert warm.of(SpawnerDied) == []
    warm.stop()


@pytest.mark.prove
def test_a_warm_worker_starts_with_the_ignored_signals_of_its_launch(
    driver: Driver, tmp_path: Path, news: News
) -> None:
    """Unless a module that was loaded before handles one; all others are as in any program."""
    (tmp_path / "handles_usr2.py").write_text("import signal\nsignal.signal(signal.SIGUSR2, print)\n")
    keep_warm(driver.guard, tmp_path, "handles_usr2", standbys=1)
    driver.until(Warm)
    body = "print(open('/proc/self/status').read(), file=open(sys.argv[2], 'w'))"
    launch = script(tmp_path, news, body, str(tmp_path / "status"))
    spawn(driver, 1, replace(launch, ignored=(signal.SIGUSR1, signal.SIGUSR2)))
    assert driver.until(Exited).returncode == 0
    assert news.line().startswith("warm")
    pairs = (
        line.split() for line in (tmp_path / "status").read_text().splitlines() if line.startswith("Sig")
    )
    masks = {name.rstrip(":"): int(mask, 16) for name, mask in pairs if name != "SigQ:"}
    assert masks["SigBlk"] == masks["SigPnd"] == 0
    assert {number for number in linux.JOB_SIGNALS if masks["SigIgn"] >> (number - 1) & 1} == {signal.SIGUSR1}
    handled = {number for number in linux.JOB_SIGNALS if masks["SigCgt"] >> (number - 1) & 1}
    assert handled == {signal.SIGUSR2, signal.SIGINT}  # the second is Python's own
    driver.stop()


def test_daemonised_processes_are_killed_and_standbys_are_spared(
    warm: Driver, tmp_path: Path, news: News
) -> None:
    warm.until(Warm)
    for generation, grace_s in ((1, 0.0), (2, 1000.0)):
        spawn(warm, generation, script(tmp_path, news, DAEMONISE, "", "time.sleep(1000)"))
        warm.until(Spawned)
        told = [news.line(), news.line()]
        with watching(int(next(line for line in told if line.isdigit()))) as (left,):
            before = standbys_of(warm.guard.pid)
            assert warm.stop(grace_s).unkillable == ()
            assert left.ended(0)
            assert before <= standbys_of(warm.guard.pid)


@pytest.mark.parametrize(
    ("preload", "reason"),
    [
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
            "threads",
        ),
        pytest.param(
            "import torch\ntorch.cuda.is_initialized = lambda: True", "torch.cuda", marks=pytest.mark.prove
        ),
        pytest.param(
            "import torch\ntorch.set_num_threads(2)\ntorch.ones(500, 500) @ torch.ones(500, 500)",
            "threads",
            marks=pytest.mark.prove,
        ),
    ],
    ids=["a thread", "an accelerator", "a parallel operation"],
)
def test_an_unsafe_preload_is_named_and_workers_start_cold(
    driver: Driver, tmp_path: Path, news: News, preload: str, reason: str
) -> None:
    (tmp_path / "mymodel.py").write_text(preload)
    keep_warm(driver.guard, tmp_path, "mymodel")
    assert staying(driver, 1, tmp_path, news)[1] == {"cold"}
    assert reason in driver.of(Cold)[0].reason
    driver.stop()


def test_the_wait_for_the_spawners_imports_is_limited(driver: Driver, tmp_path: Path, news: News) -> None:
    (tmp_path / "slow_model.py").write_text("import time\ntime.sleep(1000)\n")
    keep_warm(driver.guard, tmp_path, "slow_model")
    driver.guard.spawn(1, [script(tmp_path, news, STAY)], warm_patience_s=0.2)
    assert driver.until(WarmLate).generation == 1
    driver.until(Spawned)
    assert news.line().split()[0] == "cold"
    driver.stop()


def test_a_stop_while_waiting_for_the_spawner_takes_effect_at_once_and_is_no_failure_to_start(
    driver: Driver, tmp_path: Path, news: News
) -> None:
    (tmp_path / "slow_model.py").write_text("import time\ntime.sleep(1000)\n")
    keep_warm(driver.guard, tmp_path, "slow_model")
    driver.guard.spawn(1, [script(tmp_path, news, STAY)], warm_patience_s=1000.0)
    driver.guard.stop(1000.0)
    assert driver.until(Stopped).unkillable == ()
    assert driver.of(SpawnFailed) == []
    assert news.silent()


def test_a_stop_before_standbys_have_read_their_launch_takes_effect(
    warm: Driver, tmp_path: Path, news: News
) -> None:
    warm.until(Warm)
    staying(warm, 1, tmp_path, news)
    warm.stop()
    frozen = await_standbys(warm.guard.pid)
    for pid in frozen:
        freeze(pid)
    spawn(warm, 2, *(script(tmp_path, news, STAY, slot=slot) for slot in range(len(frozen))))
    warm.stop()
    assert staying(warm, 3, tmp_path, news)[1] == {"warm"}
    warm.stop()


@pytest.mark.prove
def test_an_unresponsive_spawner_is_replaced(warm: Driver, tmp_path: Path, news: News) -> None:
    warm.until(Warm)
    freeze(spawner_of(warm.guard.pid))
    launches = [script(tmp_path, news, STAY, slot=slot) for slot in range(5)]
    warm.guard.spawn(1, launches, warm_patience_s=0.3)
    assert not warm.until(WarmLate).importing
    assert len(warm.until(Spawned).pids) == 5
    assert {news.line().split()[0] for _ in range(5)} <= {"warm", "cold"}
    warm.stop()
    if len(warm.of(Warm)) < 2:
        warm.until(Warm)
    spawn(warm, 2, *launches)
    warm.until(Spawned)
    assert {news.line().split()[0] for _ in range(5)} == {"warm"}
    warm.stop()


def test_no_spawner_process_outlives_a_killed_guard(warm: Driver, tmp_path: Path, news: News) -> None:
    pids, _ = staying(warm, 1, tmp_path, news)
    pids |= {spawner_of(warm.guard.pid)} | standbys_of(warm.guard.pid)
    with watching(*pids) as processes:
        os.kill(warm.guard.pid, signal.SIGKILL)
        assert all(process.ended() for process in processes)


def spawner_of(guard_pid: int) -> int:
    """Return the spawner's pid, or 0. A standby that was just forked still has its name, but came later."""
    return next(iter(_children_named(guard_pid, "elastic-spawner")), 0)


def standbys_of(guard_pid: int) -> set[int]:
    return {*_children_named(guard_pid, "elastic-standby")}


def await_standbys(guard_pid: int) -> set[int]:
    """Some standbys. The guard sends no event for them, so they have to be polled."""
    return wait_for("standbys", lambda: standbys_of(guard_pid))


def _children_named(guard_pid: int, name: str) -> list[int]:
    """Return them in the order in which they became its children."""
    return [pid for pid in linux.children(guard_pid) if linux.process_name(pid) == name]
