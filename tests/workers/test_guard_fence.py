"""No worker outlives the lease, the agent or the guard, whatever else is frozen or dead."""

from __future__ import annotations

import mmap
import os
import signal

import pytest

from elastic_agent import linux
from elastic_agent.linux import boottime_s
from elastic_agent.testing.processes import freeze, thaw
from elastic_agent.workers.guard.__main__ import Lease
from elastic_agent.workers.guard.client import Exited, Fenced, GuardLost, Signalled, Spawned, Stopped
from tests.processes import status_field
from tests.waiting import wait_for
from tests.workers.support import (
    SLEEP,
    Driver,
    News,
    StandIn,
    agent_with_stderr,
    daemonising,
    deaf,
    program,
    python,
    watching,
)

# --- the deadline, by a clock of the test ---------------------------------------------------------


class VirtualLease:
    """A lease whose deadline is written as an agent does, and whose clock the test sets."""

    def __init__(self) -> None:
        self.now_ns = 0
        memory_fd = os.memfd_create("lease")
        os.ftruncate(memory_fd, mmap.PAGESIZE)
        self._cell = memoryview(mmap.mmap(memory_fd, mmap.PAGESIZE)).cast("Q")
        self.lease = Lease(memory_fd, lambda: self.now_ns)
        os.close(memory_fd)

    def late_ns(self, now_ns: int, deadline_ns: int | None) -> int | None:
        """Write a deadline, if there is a new one, and return what the guard sees."""
        if deadline_ns is not None:
            self._cell[0] = deadline_ns
        self.now_ns = now_ns
        return self.lease.late_ns()


@pytest.mark.parametrize(
    "looks",
    [
        [(5, None, None)],
        [(5, 9, -4), (8, None, -1), (9, None, 0), (11, None, 2)],
        [(5, 9, -4), (8, 20, -12), (10, None, -10), (20, None, 0)],
        [(5, 9, -4), (10, 20, -10), (21, None, 1)],
        [(5, 9, -4), (6, 7, -1), (7, None, 0)],
        [(5, 9, -4), (8, 0, None), (10, None, None), (11, 12, -1), (12, None, 0)],
        [(5, 4, 1)],
    ],
    ids=["none", "expires", "is renewed", "is renewed late", "is shortened", "is removed", "is past"],
)
def test_the_newest_deadline_decides(looks: list[tuple[int, int | None, int | None]]) -> None:
    """Each look: the time, the deadline that is written before it, and how late it is then."""
    lease = VirtualLease()
    assert [lease.late_ns(now, written) for now, written, _ in looks] == [late for *_, late in looks]


# --- the deadline, with a guard -------------------------------------------------------------------


def await_look(driver: Driver) -> None:
    """Wait until the guard has looked at the deadline once more, as it does before it reports a signal."""
    os.kill(driver.guard.pid, signal.SIGUSR1)
    driver.until(Signalled)


def test_at_the_deadline_everything_is_killed_without_grace(driver: Driver, news: News) -> None:
    """So is what workers have left, whether or not they have exited."""
    driver.guard.spawn(
        6, [daemonising(0, news), program(1, *SLEEP), daemonising(2, news, worker="sys.exit(0)")]
    )
    assert driver.until(Exited).slot == 2
    with watching(int(news.line()), int(news.line())) as daemons:
        deadline_s = boottime_s() + 0.2
        driver.guard.set_deadline(deadline_s)
        assert driver.until(Fenced).generation == 6
        assert driver.until(Stopped) == Stopped(6, ())
        assert all(daemon.ended(0) for daemon in daemons)
    exits = driver.of(Exited)[1:]
    assert {(event.slot, event.returncode) for event in exits} == {(0, -signal.SIGKILL), (1, -signal.SIGKILL)}
    assert all(event.stopping and event.at_boottime_s >= deadline_s for event in exits)


def test_a_guard_that_was_frozen_beyond_a_renewed_deadline_kills_nothing(driver: Driver) -> None:
    driver.guard.spawn(1, [program(0, *SLEEP)])
    with watching(driver.until(Spawned).pids[0]) as (worker,):
        freeze(driver.guard.pid)
        deadline_s = boottime_s()
        driver.guard.set_deadline(deadline_s)
        driver.guard.set_deadline(deadline_s + 1000)
        wait_for("the first deadline", lambda: boottime_s() > deadline_s)
        thaw(driver.guard.pid)
        await_look(driver)
        assert not worker.ended(0)
    assert not driver.of(Fenced)


def test_the_deadline_shortens_a_grace_period(driver: Driver, news: News) -> None:
    driver.guard.spawn(1, [deaf(0, news)])
    assert news.line() == "deaf"
    driver.guard.stop(1000.0)
    driver.guard.set_deadline(boottime_s() + 0.1)
    driver.until(Fenced)
    driver.until(Stopped)


def test_a_generation_that_was_stopped_is_not_fenced(driver: Driver) -> None:
    driver.guard.spawn(1, [program(0, *SLEEP)])
    driver.stop()
    driver.guard.set_deadline(boottime_s() - 1)
    driver.stop()
    assert not driver.of(Fenced)


# --- processes that are frozen --------------------------------------------------------------------

GOES_ON = """
import os, sys, time
fd = os.open(sys.argv[1], os.O_WRONLY)
while True:
    os.write(fd, b"goes on\\n")
    time.sleep(0.01)
"""


def test_after_a_freeze_beyond_the_deadline_the_guard_kills_before_anything_else(
    driver: Driver, news: News
) -> None:
    """Before commands that came meanwhile, and before it reports an earlier death; a frozen worker runs no more."""
    driver.guard.spawn(1, [python(0, GOES_ON, str(news.path)), program(1, *SLEEP)])
    pids = driver.until(Spawned).pids
    assert news.line() == "goes on"
    for pid in (driver.guard.pid, *pids.values()):
        freeze(pid)
    while not news.silent():
        news.line()
    seen = len(driver.events)
    driver.guard.set_deadline(boottime_s())
    driver.guard.stop(1000.0)
    with watching(pids[1]) as (killed,):
        os.kill(pids[1], signal.SIGKILL)
        assert killed.ended()
    thaw(driver.guard.pid)
    driver.until(Stopped)
    kinds = [type(event) for event in driver.events[seen:]]
    assert kinds == [Fenced, Exited, Exited, Stopped]
    assert {event.returncode for event in driver.of(Exited)} == {-signal.SIGKILL}
    assert news.silent()


def test_a_frozen_agent_is_fenced_and_gets_all_events_when_it_thaws(agent: StandIn, news: News) -> None:
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
        assert linux.is_frozen(agent.pid)
        thaw(agent.pid)
    agent.until("Fenced")
    agent.until("Stopped")
    exits = [event for event in agent.events if event["name"] == "Exited"]
    assert [len(event["stderr_tail"]) for event in exits] == [8000] * 60


# --- death of the agent ---------------------------------------------------------------------------


IGNORES_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@pytest.mark.parametrize("when", ["workers run", "a child holds its socket", "workers have a grace period"])
def test_no_process_outlives_a_killed_agent(agent: StandIn, news: News, when: str) -> None:
    stays = f"{IGNORES_SIGTERM}; tell(0); time.sleep(1000)"
    pids = agent.spawn(
        daemonising(0, news, daemon=IGNORES_SIGTERM, worker=stays),
        daemonising(1, news, daemon=IGNORES_SIGTERM, worker="sys.exit(0)"),
    )
    daemons = {int(news.line()) for _ in range(3)} - {0}
    forked = []
    if when == "a child holds its socket":
        agent.do("fork")
        forked.append(agent.until("Forked")["pid"])
    elif when == "workers have a grace period":
        agent.do("stop", grace_s=1000.0)
    with watching(*forked), watching(pids[0], *daemons, agent.guard_pid) as processes:
        os.kill(agent.pid, signal.SIGKILL)
        assert all(process.ended() for process in processes)


# --- death of the guard ---------------------------------------------------------------------------


def test_the_agent_kills_daemonised_processes_of_a_killed_guard(agent: StandIn, news: News) -> None:
    pids = agent.spawn(daemonising(0, news), program(1, *SLEEP))
    with watching(*pids.values(), int(news.line())) as processes:
        os.kill(agent.guard_pid, signal.SIGKILL)
        agent.until("GuardLost")
        assert agent.until("Orphans")["left"] == []
        assert all(process.ended() for process in processes)


def test_a_lost_guard_is_reported_once_and_later_commands_have_no_effect(driver: Driver) -> None:
    with watching(driver.guard.pid) as (guard,):
        os.kill(driver.guard.pid, signal.SIGKILL)
        assert guard.ended()
    assert driver.until(GuardLost) == GuardLost(-signal.SIGKILL)
    driver.guard.spawn(1, [program(0, "true")])
    driver.guard.stop(0.0)
    driver.guard.set_deadline(boottime_s())
    assert driver.guard.read_events() == []


# --- a blocked stderr -----------------------------------------------------------------------------


SCREAM = "import os; os.write(2, b'x' * 1000)\nwhile True: os.write(2, b'y' * 65536)"


@pytest.mark.parametrize("kind", ["pipe", "terminal", "socket"])
def test_a_blocked_stderr_neither_delays_fencing_nor_keeps_the_guard_alive(kind: str, news: News) -> None:
    with agent_with_stderr(kind) as (agent, _):
        pids = agent.spawn(python(0, SCREAM), daemonising(1, news))
        with watching(*pids.values(), int(news.line())) as processes:
            agent.do("deadline", in_s=0.5)
            agent.until("Fenced")
            agent.until("Stopped")
            assert all(process.ended(0) for process in processes)
        screamer = next(event for event in agent.events if event["name"] == "Exited" and event["slot"] == 0)
        assert screamer["stderr_tail"].endswith("y" * 1000)
        with watching(agent.guard_pid) as (guard,):
            os.kill(agent.pid, signal.SIGKILL)
            assert guard.ended()


def test_a_worker_blocks_on_its_output_if_stderr_is_not_read() -> None:
    """It must not fill the guard's memory: once all buffers are full, it sleeps in its write."""
    with agent_with_stderr("pipe") as (agent, _):
        pid = agent.spawn(python(0, SCREAM))[0]
        written: list[int] = []

        def is_blocked() -> bool:
            written.append(linux.transferred_bytes(pid))
            return linux.thread_state(pid) == "S" and written[-20:] == [written[-1]] * 20

        wait_for("the worker to sleep in its write", is_blocked)
        resident_kib = int(status_field(agent.guard_pid, "VmRSS").split()[0])
        assert resident_kib < 40_000
