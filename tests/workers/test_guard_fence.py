"""No worker outlives the lease, the agent or the guard, whatever else is frozen or dead."""

from __future__ import annotations

import os
import pty
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from elastic_agent.linux import boottime_s
from elastic_agent.testing.node import freeze, thaw
from elastic_agent.workers.guard.client import Exited, Fenced, GuardLost, Spawned, Stopped
from tests.processes import status_field
from tests.workers.support import (
    PATIENCE_S,
    SLEEP,
    Driver,
    News,
    StandIn,
    daemonising,
    program,
    python,
    watching,
)

pytestmark = pytest.mark.faults


# --- the deadline ---------------------------------------------------------------------------------


def test_at_the_deadline_everything_is_killed_without_grace(driver: Driver, news: News) -> None:
    driver.guard.spawn(6, [daemonising(0, news), program(1, *SLEEP)])
    with watching(int(news.line())) as (daemon,):
        deadline_s = boottime_s() + 0.2
        driver.guard.set_deadline(deadline_s)
        fenced = driver.until(Fenced)
        assert fenced.generation == 6
        assert 0.0 <= fenced.late_s < 1.0
        assert driver.until(Stopped) == Stopped(6, ())
        assert daemon.ended(0)
    exits = driver.of(Exited)
    assert {(event.slot, event.returncode) for event in exits} == {(0, -signal.SIGKILL), (1, -signal.SIGKILL)}
    assert all(event.stopping and event.at_boottime_s >= deadline_s for event in exits)


def test_a_renewed_lease_lets_the_workers_live(driver: Driver) -> None:
    driver.guard.spawn(1, [program(0, "sleep", "1.2")])
    driver.guard.set_deadline(boottime_s() + 1.0)
    driver.guard.set_deadline(boottime_s() + 1000)
    assert driver.until(Exited).returncode == 0
    assert not driver.of(Fenced)


def test_a_removed_deadline_does_not_count(driver: Driver) -> None:
    driver.guard.spawn(1, [program(0, "sleep", "1.2")])
    driver.until(Spawned)
    driver.guard.set_deadline(boottime_s() + 1.0)
    driver.guard.set_deadline(None)
    assert driver.until(Exited).returncode == 0
    assert not driver.of(Fenced)


def test_a_deadline_set_when_there_was_none_counts(driver: Driver) -> None:
    driver.guard.spawn(1, [program(0, *SLEEP)])
    driver.until(Spawned)
    driver.guard.set_deadline(None)
    driver.guard.set_deadline(boottime_s() + 0.1)
    driver.until(Fenced)


def test_the_deadline_shortens_a_grace_period(driver: Driver, news: News) -> None:
    code = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(sys.argv[1], "w").write("deaf\\n")
        time.sleep(1000)
    """
    driver.guard.spawn(1, [python(0, code, str(news.path))])
    assert news.line() == "deaf"
    driver.guard.stop(1000.0)
    driver.guard.set_deadline(boottime_s() + 0.1)
    driver.until(Fenced)
    driver.until(Stopped)


def test_the_deadline_applies_to_processes_left_by_exited_workers(driver: Driver, news: News) -> None:
    driver.guard.spawn(1, [daemonising(0, news, worker="sys.exit(0)")])
    with watching(int(news.line())) as (daemon,):
        driver.until(Exited)
        driver.guard.set_deadline(boottime_s() + 0.1)
        driver.until(Fenced)
        driver.until(Stopped)
        assert daemon.ended(0)


def test_a_generation_that_was_stopped_is_not_fenced(driver: Driver) -> None:
    driver.guard.spawn(1, [program(0, *SLEEP)])
    driver.guard.stop(0.0)
    driver.until(Stopped)
    driver.guard.set_deadline(boottime_s() - 1)
    driver.guard.stop(0)
    driver.until(Stopped)
    assert not driver.of(Fenced)


def test_a_guard_past_its_deadline_is_idle(driver: Driver) -> None:
    driver.guard.spawn(1, [program(0, *SLEEP)])
    driver.until(Spawned)
    driver.guard.set_deadline(boottime_s() + 0.05)
    driver.until(Stopped)
    before = int(status_field(driver.guard.pid, "voluntary_ctxt_switches"))
    select.select((), (), (), 0.2)
    woken = int(status_field(driver.guard.pid, "voluntary_ctxt_switches")) - before
    assert woken <= 2, "it says that all are stopped before it goes to sleep, which may count, once"


def test_a_frozen_agent_is_fenced_by_the_guard_alone(agent: StandIn, news: News) -> None:
    pids = agent.spawn(daemonising(0, news), program(1, *SLEEP))
    with watching(*pids.values(), int(news.line())) as processes:
        agent.do("deadline", in_s=0.5)
        agent.until("DeadlineSet")
        freeze(agent.pid)
        assert all(process.ended() for process in processes)
        thaw(agent.pid)
        assert 0.0 <= agent.until("Fenced")["late_s"] < 1.0
        agent.until("Stopped")


def test_a_frozen_agent_gets_all_events_when_it_thaws(agent: StandIn, news: News) -> None:
    """They are more than its socket holds, so the guard must keep them, and must not wait to fence."""
    script = 'head -c 8000 /dev/zero | tr "\\0" x >&2; echo told > "$0"; exec sleep 1000'
    launches = [program(slot, "sh", "-c", script, str(news.path), stderr=os.devnull) for slot in range(60)]
    pids = agent.spawn(*launches)
    assert [news.line() for _ in launches] == ["told"] * 60
    agent.do("deadline", in_s=0.3)
    agent.until("DeadlineSet")
    with watching(*pids.values()) as workers:
        freeze(agent.pid)
        assert all(worker.ended() for worker in workers)
        thaw(agent.pid)
    agent.until("Stopped")
    exits = [event for event in agent.events if event["name"] == "Exited"]
    assert [len(event["stderr_tail"]) for event in exits] == [8000] * 60


def test_when_all_thaw_after_the_deadline_the_guard_kills_workers_first(agent: StandIn, news: News) -> None:
    code = """
        import os, sys, time
        fd = os.open(sys.argv[1], os.O_WRONLY)
        os.write(fd, b"begins\\n")
        last = time.monotonic()
        while time.monotonic() - last < 0.3:  # until it was frozen for as long
            last = time.monotonic()
            time.sleep(0.01)
        time.sleep(0.3)
        os.write(fd, b"went on for 0.3 s after it thawed\\n")
        time.sleep(1000)
    """
    pids = agent.spawn(python(0, code, str(news.path)), daemonising(1, news))
    assert "begins" in {news.line(), news.line()}
    agent.do("deadline", in_s=0.3)
    agent.until("DeadlineSet")
    frozen = (agent.pid, agent.guard_pid, *pids.values())
    for pid in frozen:
        freeze(pid)
    with watching(*pids.values()) as workers:
        select.select((), (), (), 0.8)
        for pid in frozen:
            thaw(pid)
        assert all(worker.ended() for worker in workers)
    assert agent.until("Fenced")["late_s"] > 0.4
    agent.until("Stopped")
    assert news.silent()


# --- death of the agent ---------------------------------------------------------------------------


def test_no_process_outlives_a_killed_agent(agent: StandIn, news: News) -> None:
    pids = agent.spawn(daemonising(0, news), daemonising(1, news, worker="sys.exit(0)"), program(2, *SLEEP))
    daemons = [int(news.line()) for _ in range(2)]
    alive = [pids[0], pids[2], *daemons, agent.guard_pid]
    with watching(*alive) as processes:
        os.kill(agent.pid, signal.SIGKILL)
        assert all(process.ended() for process in processes)


def test_a_child_with_the_agents_descriptors_does_not_prevent_fencing(agent: StandIn, news: News) -> None:
    """As a forked helper process does: the socket to the guard then stays open when the agent dies."""
    agent.spawn(daemonising(0, news))
    agent.do("fork")
    with watching(agent.until("Forked")["pid"]), watching(int(news.line()), agent.guard_pid) as processes:
        os.kill(agent.pid, signal.SIGKILL)
        assert all(process.ended() for process in processes)


def test_an_agent_killed_during_a_grace_period_leaves_no_processes(agent: StandIn, news: News) -> None:
    ignoring = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    pids = agent.spawn(daemonising(0, news, daemon=ignoring, worker=f"{ignoring}; tell(0); time.sleep(1000)"))
    told = {news.line(), news.line()}
    daemon = int(next(line for line in told if line != "0"))
    agent.do("stop", grace_s=1000.0)
    with watching(pids[0], daemon, agent.guard_pid) as processes:
        os.kill(agent.pid, signal.SIGKILL)
        assert all(process.ended() for process in processes)


# --- death of the guard ---------------------------------------------------------------------------


def test_the_agent_kills_daemonised_processes_of_a_killed_guard(agent: StandIn, news: News) -> None:
    pids = agent.spawn(daemonising(0, news), program(1, *SLEEP))
    with watching(*pids.values(), int(news.line())) as processes:
        os.kill(agent.guard_pid, signal.SIGKILL)
        assert agent.until("GuardLost")["returncode"] == -signal.SIGKILL
        assert agent.until("Orphans")["left"] == []
        assert all(process.ended(0) for process in processes)


def test_a_lost_guard_is_reported_once_and_later_commands_have_no_effect(driver: Driver) -> None:
    os.kill(driver.guard.pid, signal.SIGKILL)
    assert driver.until(GuardLost) == GuardLost(-signal.SIGKILL)
    driver.guard.spawn(1, [program(0, "true")])
    driver.guard.stop(0.0)
    driver.guard.set_deadline(boottime_s())
    assert driver.guard.read_events() == []


# --- a blocked stderr -----------------------------------------------------------------------------


SCREAM = "import os; os.write(2, b'x' * 1000)\nwhile True: os.write(2, b'y' * 65536)"


@contextmanager
def blocked_agent(kind: str) -> Iterator[StandIn]:
    """An agent whose stderr is not read."""
    if kind == "pipe":
        read_end, write_end = os.pipe()
    elif kind == "terminal":
        read_end, write_end = pty.openpty()
    else:
        pair = socket.socketpair()
        read_end, write_end = (end.detach() for end in pair)
    agent = StandIn(stderr=write_end)
    try:
        yield agent
    finally:
        agent.close()
        os.close(read_end)
        os.close(write_end)


@pytest.mark.parametrize("kind", ["pipe", "terminal", "socket"])
def test_a_blocked_stderr_does_not_delay_fencing(kind: str, news: News) -> None:
    with blocked_agent(kind) as agent:
        pids = agent.spawn(python(0, SCREAM), daemonising(1, news))
        with watching(*pids.values(), int(news.line())) as processes:
            agent.do("deadline", in_s=0.5)
            assert agent.until("Fenced")["late_s"] < 1.0
            agent.until("Stopped")
            assert all(process.ended(0) for process in processes)
        screamer = next(event for event in agent.events if event["name"] == "Exited" and event["slot"] == 0)
        assert screamer["stderr_tail"] == "y" * 8192


@pytest.mark.parametrize("kind", ["pipe", "terminal", "socket"])
def test_a_blocked_stderr_does_not_keep_the_guard_alive(kind: str) -> None:
    with blocked_agent(kind) as agent:
        pids = agent.spawn(python(0, SCREAM))
        with watching(pids[0], agent.guard_pid) as (worker, guard):
            os.kill(agent.pid, signal.SIGKILL)
            assert worker.ended(2.0)
            assert guard.ended(PATIENCE_S)


def test_a_worker_blocks_on_its_output_if_stderr_is_not_read() -> None:
    """It must not fill the guard's memory: once all buffers are full, it sleeps in its write."""
    with blocked_agent("pipe") as agent:
        pid = agent.spawn(python(0, SCREAM))[0]
        with watching(pid) as (worker,):
            assert not worker.ended(0.5)
            resident_kib = int(status_field(agent.guard_pid, "VmRSS").split()[0])
            assert resident_kib < 40_000
