"""The guard starts workers as told, and tells how each ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from elastic_agent.linux import boottime_s
from elastic_agent.testing.processes import freeze
from elastic_agent.workers.guard.client import Exited, Guard, Launch, Ready, Spawned, SpawnFailed, Stopped
from elastic_agent.workers.guard.line import NO_SLOT
from tests.workers.support import SLEEP, Driver, program, watching


def test_exit_codes_and_signals_are_reported(driver: Driver) -> None:
    before_s = boottime_s()
    driver.guard.spawn(
        3,
        [
            program(0, "true"),
            program(1, "sh", "-c", "exit 7"),
            program(2, "sh", "-c", "kill -SEGV $$"),
        ],
    )
    pids = driver.until(Spawned).pids
    exits = {event.slot: event for event in (driver.until(Exited) for _ in range(3))}
    assert {slot: event.returncode for slot, event in exits.items()} == {0: 0, 1: 7, 2: -signal.SIGSEGV}
    assert {slot: event.pid for slot, event in exits.items()} == pids
    assert all(event.generation == 3 and not event.stopping for event in exits.values())
    assert all(before_s <= event.at_boottime_s <= boottime_s() for event in exits.values())


def test_exits_are_reported_in_order(driver: Driver) -> None:
    """Also when the guard was away and finds all of them dead at once."""
    driver.guard.spawn(1, [program(slot, *SLEEP) for slot in range(8)])
    pids = driver.until(Spawned).pids
    order = [5, 0, 7, 2, 1, 6, 3, 4]
    freeze(driver.guard.pid)
    for slot in order:
        with watching(pids[slot]) as (worker,):
            os.kill(worker.pid, signal.SIGKILL)
            assert worker.ended()
    os.kill(driver.guard.pid, signal.SIGCONT)
    assert [driver.until(Exited).slot for _ in order] == order


@pytest.mark.parametrize("ignored", [(), (signal.SIGUSR1, signal.SIGUSR2)])
def test_a_worker_has_default_signals_but_for_those_that_its_launch_ignores(
    driver: Driver, tmp_path: Path, ignored: tuple[int, ...]
) -> None:
    """Python ignores SIGPIPE and the guard ignores SIGTERM; neither may reach the worker."""
    output = tmp_path / "out"
    wanted = ("grep", "-E", "^Sig(Pnd|Blk|Ign):", "/proc/self/status")
    driver.guard.spawn(1, [program(0, *wanted, stdout=str(output), ignored=ignored)])
    assert driver.until(Exited).returncode == 0
    masks = [int(line.split()[1], 16) for line in output.read_text().splitlines()]
    # Signals 32 and 33 are the C library's own; what posix_spawn started, as make does, inherits them ignored.
    expected = sum(1 << (number - 1) for number in ignored)
    assert [mask & ~(0b11 << 31) for mask in masks] == [0, 0, expected]


def test_a_worker_leads_its_own_session_and_dies_with_the_guard(driver: Driver) -> None:
    driver.guard.spawn(1, [program(0, *SLEEP)])
    pid = driver.until(Spawned).pids[0]
    assert os.getsid(pid) == os.getpgid(pid) == pid
    with watching(pid) as (worker,):
        os.kill(driver.guard.pid, signal.SIGKILL)
        assert worker.ended()


def test_hundreds_of_kilobytes_of_environment_reach_the_workers(driver: Driver) -> None:
    big = {f"BIG_{i}": "x" * 100_000 for i in range(10)}
    launches = [Launch(slot, ("sh", "-c", 'exit "${#BIG_9}"'), big | dict(os.environ)) for slot in range(4)]
    driver.guard.spawn(1, launches)
    assert {driver.until(Exited).returncode for _ in launches} == {100_000 % 256}


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        (
            {"argv": ("/no/such/python", "train.py")},
            "cannot start '/no/such/python': No such file or directory",
        ),
        ({"argv": ("no-such-program",)}, "cannot start 'no-such-program': No such file or directory"),
        ({"argv": ("/etc/passwd",)}, "cannot start '/etc/passwd': Permission denied"),
        ({"stdout": "/no/such/out"}, "cannot open '/no/such/out': No such file or directory"),
        ({"stderr": "/no/such/err"}, "cannot open '/no/such/err': No such file or directory"),
        ({"argv": ("sh", "-c", "x" * 200_000)}, "cannot start 'sh': Argument list too long"),
    ],
)
def test_a_worker_that_cannot_be_started_is_named_and_the_others_are_stopped(
    driver: Driver, fields: dict[str, object], error: str
) -> None:
    whole: dict[str, object] = {"argv": SLEEP, "env": dict(os.environ), "slot": 1, **fields}
    driver.guard.spawn(4, [program(0, *SLEEP), Launch(**whole)])  # type: ignore[arg-type]
    assert driver.until(SpawnFailed) == SpawnFailed(4, 1, error)
    assert driver.until(Stopped) == Stopped(4, ())
    assert [event.slot for event in driver.of(Exited)] == [0]
    assert not driver.of(Spawned)
    driver.guard.spawn(5, [program(0, "true")])
    assert driver.until(Exited).generation == 5


@pytest.mark.parametrize(
    ("deadline_in_s", "reason"), [(None, "this node holds no lease"), (-0.5, "the lease expired ")]
)
def test_nothing_starts_without_a_lease(driver: Driver, deadline_in_s: float | None, reason: str) -> None:
    driver.guard.set_deadline(None if deadline_in_s is None else boottime_s() + deadline_in_s)
    driver.guard.spawn(1, [program(0, *SLEEP)])
    refusal = driver.until(SpawnFailed)
    assert (refusal.slot, refusal.error[: len(reason)]) == (NO_SLOT, reason)
    assert driver.until(Stopped) == Stopped(1, ())


def test_a_second_generation_must_wait_for_the_first_to_be_stopped(driver: Driver) -> None:
    driver.guard.spawn(1, [program(0, "true")])
    driver.until(Exited)
    driver.guard.spawn(2, [program(0, "true")])
    assert driver.until(SpawnFailed) == SpawnFailed(2, NO_SLOT, "generation 1 is not stopped yet")
    assert driver.until(Stopped).generation == 2
    assert driver.stop().generation == 1
    driver.guard.spawn(3, [program(0, "true")])
    assert driver.until(Exited).generation == 3


def test_signals_and_commands_may_come_before_the_guard_is_ready() -> None:
    guard = Guard.start()
    for signum in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
        os.kill(guard.pid, signum)
    guard.set_deadline(boottime_s() + 1000)
    guard.spawn(1, [program(0, "true")])
    driver = Driver(guard)
    assert driver.until(Exited).returncode == 0
    assert isinstance(driver.events[0], Ready)
    guard.close()
