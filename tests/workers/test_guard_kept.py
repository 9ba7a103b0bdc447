"""Keeping workers when their generation is stopped: they live on, with all that is theirs, and nothing else does."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from elastic_agent import linux
from elastic_agent.linux import boottime_s
from elastic_agent.worker_variables import SLOT
from elastic_agent.workers.guard.client import Exited, Fenced, Launch, Spawned, SpawnFailed, Stopped
from tests.waiting import wait_for
from tests.workers.support import SLEEP, Driver, News, daemonising, deaf, program, python, watching


def parked(driver: Driver, *launches: Launch) -> dict[int, int]:
    """Start these workers as generation 1, stop it but for that of slot 0, and return all processes."""
    driver.guard.spawn(1, launches or [program(0, *SLEEP), program(1, *SLEEP)])
    pids = driver.until(Spawned).pids
    driver.guard.stop(0.0, keep=[pids[0]])
    assert driver.until(Stopped) == Stopped(1, (), {0: pids[0]})
    return pids


def test_a_kept_worker_lives_and_goes_on_in_the_next_generation_beside_new_ones(driver: Driver) -> None:
    pids = parked(driver)
    assert [(end.slot, end.returncode) for end in driver.of(Exited)] == [(1, -signal.SIGKILL)]
    driver.guard.spawn(2, [program(0, *SLEEP, parked=pids[0]), program(1, *SLEEP)])
    after = driver.until(Spawned).pids
    assert after[0] == pids[0]
    assert after[1] != pids[1]
    os.kill(pids[0], signal.SIGUSR1)
    end = driver.until(Exited)
    assert (end.generation, end.slot, end.pid, end.stopping) == (2, 0, pids[0], False)
    assert driver.stop() == Stopped(2, ())


def test_what_is_a_kept_workers_own_lives_with_it_and_what_the_others_left_ends(
    driver: Driver, news: News
) -> None:
    """Its child and, by the slot that it was started for, its daemon; not a daemon of which nothing tells that."""
    marked = Launch(**{**vars(daemonising(0, news)), "env": {**os.environ, SLOT: "0"}})
    child = "tell(os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '1000')); time.sleep(1000)"
    driver.guard.spawn(1, [marked, daemonising(1, news), daemonising(2, news, worker=child)])
    pids = driver.until(Spawned).pids
    family = {int(news.line()) for _ in range(4)}
    child_pid = wait_for(
        "the child's program", lambda: next((p for p in family if linux.process_name(p) == "sleep"), None)
    )
    own = next(pid for pid in family if pid != child_pid and linux.environment(pid).get(SLOT) == "0")
    with watching(*family - {child_pid, own}) as others:
        driver.guard.stop(0.0, keep=[pids[0], pids[2]])
        assert driver.until(Stopped).kept == {0: pids[0], 2: pids[2]}
        assert all(other.ended() for other in others)
    with watching(child_pid, own, pids[0], pids[2]) as spared:
        assert not any(process.ended(0) for process in spared)
        assert driver.stop().kept == {}
        assert all(process.ended() for process in spared)


def test_parked_workers_die_at_the_deadline(driver: Driver) -> None:
    pids = parked(driver)
    driver.guard.set_deadline(boottime_s())
    assert driver.until(Fenced).generation == 1
    assert [end.pid for end in driver.of(Exited)] in ([pids[1]], [pids[1], pids[0]])
    assert driver.until(Stopped) == Stopped(1, ())


@pytest.mark.parametrize("whose", ["agent", "guard"])
def test_parked_workers_die_with_the_agent_and_with_the_guard(driver: Driver, whose: str) -> None:
    pids = parked(driver)
    with watching(pids[0]) as (worker,):
        if whose == "agent":
            driver.guard.close()
        else:
            os.kill(driver.guard.pid, signal.SIGKILL)
        assert worker.ended()


@pytest.mark.parametrize("why", ["no lease", "expired", "left over"])
def test_parked_workers_that_must_not_go_on_are_killed(driver: Driver, why: str) -> None:
    pids = parked(driver)
    with watching(pids[0]) as (worker,):
        if why != "left over":
            driver.guard.set_deadline(None if why == "no lease" else boottime_s() - 1.0)
        driver.guard.spawn(2, [program(0, *SLEEP, parked=None if why == "left over" else pids[0])])
        expected = {"no lease": "holds no lease", "expired": "", "left over": "have no place in it"}[why]
        assert expected in driver.until(SpawnFailed).error
        driver.until(Stopped)
        assert worker.ended()


def test_a_slot_whose_parked_worker_has_ended_gets_another_process(driver: Driver) -> None:
    pids = parked(driver, program(0, *SLEEP), program(1, *SLEEP), program(2, *SLEEP))
    os.kill(pids[0], signal.SIGKILL)
    assert [driver.until(Exited).pid for _ in range(1)] == [pids[0]]
    driver.until(Stopped)
    driver.guard.spawn(2, [program(0, *SLEEP, parked=pids[0])])
    assert driver.until(Spawned).pids[0] != pids[0]


def test_a_later_stop_keeps_no_worker_that_it_does_not_name(driver: Driver, news: News) -> None:
    driver.guard.spawn(1, [program(0, *SLEEP), deaf(1, news)])
    pids = driver.until(Spawned).pids
    assert news.line() == "deaf"
    driver.guard.stop(1000.0, keep=[pids[0]])
    assert driver.stop() == Stopped(1, ())
    assert {end.pid for end in driver.of(Exited)} == {*pids.values()}


def test_what_a_worker_prints_after_it_goes_on_is_kept_in_the_file_of_its_generation(
    driver: Driver, news: News, tmp_path: Path
) -> None:
    code = """
        import os, signal, sys
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        for word in ("before", "after"):
            print(word, file=sys.stderr, flush=True)
            open(sys.argv[1], "w").write(word + "\\n")
            signal.sigwait([signal.SIGUSR1])
    """
    first, second = tmp_path / "1.log", tmp_path / "2.log"
    fields = {"stderr": os.devnull, "stdout": os.devnull}
    driver.guard.spawn(1, [python(0, code, str(news.path), kept=str(first), **fields)])
    pid = driver.until(Spawned).pids[0]
    assert news.line() == "before"
    driver.guard.stop(0.0, keep=[pid])
    driver.until(Stopped)
    driver.guard.spawn(2, [python(0, code, str(news.path), parked=pid, kept=str(second), **fields)])
    driver.until(Spawned)
    os.kill(pid, signal.SIGUSR1)
    assert news.line() == "after"
    driver.stop()
    driver.guard.close()
    assert (first.read_text(), second.read_text()) == ("before\n", "after\n")
