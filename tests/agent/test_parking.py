"""The runner of a node's workers with workers that park, on a real guard."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from elastic_agent.agent.worker_group.collectives import Collectives
from elastic_agent.client._cells import BEATS, STEP, HeartbeatFile, claim_cell
from elastic_agent.exit_note import OPTIMIZER_STEPS
from elastic_agent.linux import boottime_s
from elastic_agent.protocol import FailureKind, Grace
from elastic_agent.workers.guard.client import Guard
from tests.agent.support import asynchronous
from tests.agent.test_runner import Bench
from tests.waiting import wait_for_async

WORKER = """
import json, os, socket, sys

address, how, told = sys.argv[1:]
line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
line.bind("")
line.connect("\\0" + address)


def say(generation, what):
    words = {"slot": 0, "generation": generation, "pid": os.getpid(), "parking": what}
    line.send(json.dumps(words).encode())


say(1, "can park")
if how == "apart":
    say(1, "has parked")
    order = json.loads(line.recv(1 << 18))
    say(order["generation"], "goes on")
    say(order["generation"], "can park")
if how == "leaves by itself":
    say(1, "has parked")
    open(told, "w").write(line.recv(100).decode())
    sys.exit(1)
assert line.recv(1 << 18) == b"park"
if how == "does not park":
    line.recv(100)
say(1, "has parked")
order = json.loads(line.recv(1 << 18))
if how == "does not go on":
    line.recv(100)
open(told, "w").write(order["variables"]["ELASTIC_AGENT_GENERATION"])
say(order["generation"], "goes on")
say(order["generation"], "can park")
line.recv(100)
"""
"""A worker that says what workers say which can park."""


@pytest.fixture
def guard() -> Iterator[Guard]:
    guard = Guard.start(kill_patience_s=1.0)
    guard.set_deadline(boottime_s() + 1000)
    yield guard
    guard.close()


class Parking(Bench):
    """A bench whose worker can park."""

    def worker(self, how: str) -> tuple[object, ...]:
        """The arguments of Python."""
        return "-I", "-S", "-c", WORKER, self.runner.collectives.address, how, self.folder / "told"

    async def begin_worker(self, generation: int, how: str) -> None:
        await self.begin(generation, *self.worker(how))


@asynccontextmanager
async def parking(guard: Guard, folder: Path) -> AsyncIterator[Parking]:
    """A bench without workers yet."""
    collectives = Collectives()
    collectives.open()
    bench = Parking(guard, folder, collectives)
    try:
        yield bench
    finally:
        bench.close()
        collectives.close()


@asynccontextmanager
async def running(guard: Guard, folder: Path, how: str) -> AsyncIterator[Parking]:
    """A worker of generation 1 that has said that it can park."""
    async with parking(guard, folder) as bench:
        await bench.begin_worker(1, how)
        await wait_for_async("the worker", lambda: bench.runner.collectives.parking.can)
        yield bench


@asynchronous
async def test_a_worker_parks_and_goes_on_in_the_next_generation(guard: Guard, tmp_path: Path) -> None:
    async with running(guard, tmp_path, "parks") as bench:
        before = bench.pids
        bench.runner.stop(Grace.RESTART, may_park=True)
        await bench.until("parked", 1)
        await bench.begin_worker(2, "parks")
        assert bench.pids == before
        assert (tmp_path / "told").read_text() == "2"


@pytest.mark.parametrize(("how", "may_park"), [("parks", False), ("does not park", True)])
@asynchronous
async def test_a_worker_that_may_not_park_or_does_not_is_stopped(
    guard: Guard, tmp_path: Path, how: str, may_park: bool
) -> None:
    async with running(guard, tmp_path, how) as bench:
        bench.runner.stop(Grace.RESTART, may_park=may_park)
        await bench.until("stopped", ())
        assert bench.ends == ["stopped"]


@asynchronous
async def test_a_stop_without_parking_overtakes_one_with_it(guard: Guard, tmp_path: Path) -> None:
    async with running(guard, tmp_path, "does not park") as bench:
        bench.runner.stop(Grace.RESTART, may_park=True)
        bench.runner.stop(Grace.NONE)
        await bench.until("stopped", ())
        assert bench.runner.parked is None


@pytest.mark.parametrize("grace", [Grace.NONE, Grace.RESTART], ids=["at once", "when the next ones start"])
@asynchronous
async def test_parked_workers_are_stopped_when_nothing_may_be_parked(
    guard: Guard, tmp_path: Path, grace: Grace
) -> None:
    async with running(guard, tmp_path, "parks") as bench:
        (worker,) = bench.pids
        bench.runner.stop(Grace.RESTART, may_park=True)
        await bench.until("parked", 1)
        if grace is Grace.RESTART:
            bench.start(2, "-")
        bench.runner.stop(grace)
        await bench.until("stopped", ())
        assert not os.path.exists(f"/proc/{worker}")
        assert not [*tmp_path.glob("*.beat")]


@asynchronous
async def test_a_worker_that_does_not_go_on_counts_as_one_that_could_not_be_started(
    guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_agent.agent.worker_group.parking.GO_ON_S", 0.1)
    async with running(guard, tmp_path, "does not go on") as bench:
        bench.runner.stop(Grace.RESTART, may_park=True)
        await bench.until("parked", 1)
        bench.start(2, "-")
        await bench.until("failed", (2, FailureKind.START))
        assert ("started", 2) not in bench.reported


@asynchronous
async def test_a_worker_that_leaves_its_world_by_itself_raises_its_error_if_nothing_follows(
    guard: Guard, tmp_path: Path
) -> None:
    async with running(guard, tmp_path, "leaves by itself") as bench:
        await bench.until("failed", (1, FailureKind.WORKER))
        bench.runner.stop(Grace.RESTART, may_park=True)
        await bench.until("stopped", ())
        assert (tmp_path / "told").read_text() == "raise"


def test_what_a_kept_worker_has_reported_is_no_progress_of_the_next_generation(tmp_path: Path) -> None:
    with contextlib.closing(HeartbeatFile.create(tmp_path, 1)) as file:
        cell = claim_cell(file.path, 0)
        assert cell is not None
        cell[BEATS], cell[STEP], cell[OPTIMIZER_STEPS] = 7, 70, 700
        file.begin_anew({0})
        assert (*file.read(0), file.optimizer_steps(0)) == (0, 0, 0)
        cell[BEATS], cell[STEP], cell[OPTIMIZER_STEPS] = 8, 71, 701
        assert (*file.read(0), file.optimizer_steps(0)) == (8, 71, 1)


@asynchronous
async def test_the_place_of_a_worker_that_ends_while_it_is_parked_gets_another_process(
    guard: Guard, tmp_path: Path
) -> None:
    async with running(guard, tmp_path, "parks") as bench:
        before = bench.pids
        bench.runner.stop(Grace.RESTART, may_park=True)
        await bench.until("parked", 1)
        os.kill(before[0], signal.SIGKILL)
        await wait_for_async("its end", lambda: bench.runner.parked is None)
        await bench.begin_worker(2, "parks")
        assert bench.pids != before


@asynchronous
async def test_a_worker_that_was_started_apart_goes_on_in_its_first_world(
    guard: Guard, tmp_path: Path
) -> None:
    async with parking(guard, tmp_path) as bench:
        bench.start(1, sys.executable, *bench.worker("apart"), apart=True)
        await bench.until("warm", True)
        assert bench.ends == ["warm"]
        assert bench.runner.parked is not None
        (worker,) = bench.runner.parked.pids.values()
        await bench.begin_worker(1, "apart")
        assert bench.pids == [worker]
        await wait_for_async("the worker", lambda: bench.runner.collectives.parking.can)
        bench.runner.stop(Grace.RESTART)
        await bench.until("stopped", ())


@pytest.mark.parametrize("script", ["pass", "raise SystemExit(1)"])
@asynchronous
async def test_a_worker_that_ends_before_it_has_a_world_is_missing(
    guard: Guard, tmp_path: Path, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with parking(guard, tmp_path) as bench:
        bench.start(1, sys.executable, "-I", "-S", "-c", script, apart=True)
        await bench.until("warm", False)
        assert bench.runner.parked is None
        assert not [*tmp_path.glob("*.beat")]
    assert "without @survive.train" in "".join(capsys.readouterr())


@asynchronous
async def test_workers_without_a_world_are_stopped_at_once(guard: Guard, tmp_path: Path) -> None:
    async with parking(guard, tmp_path) as bench:
        told = tmp_path / "told"
        script = (
            "import signal, sys; signal.signal(15, signal.SIG_IGN); open(sys.argv[1], 'w'); signal.pause()"
        )
        bench.start(1, sys.executable, "-I", "-S", "-c", script, told, apart=True)
        await wait_for_async("the worker", told.exists)
        bench.runner.stop(Grace.DRAIN)
        await bench.until("stopped", ())
        assert bench.runner.parked is None
