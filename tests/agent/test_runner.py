"""The runner of a node's workers, on a real guard."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from elastic_agent.agent import runner
from elastic_agent.agent.journal import Journal
from elastic_agent.agent.runner import Runner, RunnerCallbacks
from elastic_agent.client._cells import HeartbeatFile
from elastic_agent.protocol.records import FailureKind
from elastic_agent.workers.context import BackgroundCloser, WorkerContext
from elastic_agent.workers.gpu_memory import GpuHolder, GpuMemory
from elastic_agent.workers.guard_client import Guard, GuardLost, Stopped, boottime_s
from elastic_agent.workers.last_words import LastWords
from elastic_agent.workers.logs import GenerationLogs
from tests.processes import freeze

PATIENCE_S = 20.0


class Unprintable:
    def __str__(self) -> str:
        raise ValueError("no argument")


class Bench:
    """A runner, and what it reported, in order."""

    def __init__(self, guard: Guard, folder: Path) -> None:
        self.guard = guard
        self.folder = folder
        self.closer = BackgroundCloser()
        self.reported: list[tuple[str, object]] = []
        self.stopped_answers: list[int] = []
        self._news = asyncio.Event()
        note = self._note
        callbacks = RunnerCallbacks(
            started=lambda generation: note("started", generation),
            failed=lambda generation, failure: note("failed", (generation, failure.kind)),
            succeeded=lambda generation: note("succeeded", generation),
            yielded=lambda generation: note("yielded", generation),
            heeds=lambda generation: note("heeds", generation),
            stopped=lambda unkillable: note("stopped", unkillable),
            fenced=lambda why: note("fenced", why),
        )
        self.runner = Runner(guard, "n1", callbacks, Journal(None), hang_timeout_s=0.0)
        asyncio.get_running_loop().add_reader(guard.fileno(), self._read)

    def _note(self, what: str, detail: object) -> None:
        self.reported.append((what, detail))
        self._news.set()

    def _read(self) -> None:
        for event in self.guard.read_events():
            if isinstance(event, Stopped):
                self.stopped_answers.append(event.generation)
            if isinstance(event, GuardLost):
                self.close()
                self._note("guard lost", event.returncode)
            self.runner.handle(event)
        self._news.set()

    def start(self, generation: int, program: str, *arguments: object) -> None:
        envs = {0: {"ELASTIC_AGENT_GENERATION": str(generation)}}
        logs = GenerationLogs(str(self.folder / "logs"))
        context = WorkerContext(self.guard, generation, "w", program, {0: arguments}, envs, logs, self.closer)
        beats = HeartbeatFile.create(self.folder, 1)
        self.runner.start(generation, context, beats)

    async def until(self, what: str, detail: object) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (what, detail) not in self.reported:
                self._news.clear()
                await self._news.wait()

    async def until_answered(self, *generations: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.stopped_answers != [*generations]:
                self._news.clear()
                await self._news.wait()

    def start_in_vain(self, generation: int) -> None:
        """Fails before the guard is asked: a launch message cannot hold this argument."""
        with pytest.raises(ValueError, match="argument"):
            self.start(generation, sys.executable, Unprintable())

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self.guard.fileno())


@pytest.fixture
def guard() -> Iterator[Guard]:
    guard = Guard.start(kill_patience_s=1.0)
    guard.set_deadline(boottime_s() + 1000)
    yield guard
    guard.close()


def test_a_late_answer_about_one_generation_does_not_end_the_next(guard: Guard, tmp_path: Path) -> None:
    async def scene() -> Bench:
        bench = Bench(guard, tmp_path)
        bench.start(1, str(tmp_path / "no-such-program"))
        await bench.until("failed", (1, FailureKind.START))
        await bench.until("stopped", ())
        bench.runner.stop(1.0)  # as an agent does that heard of the failure before it heard of the stop
        bench.start(2, sys.executable, "-c", "import time; time.sleep(1000)")
        await bench.until("started", 2)
        await bench.until_answered(1, 1)
        assert bench.reported.count(("stopped", ())) == 1, "generation 2 was taken for stopped"
        assert len(bench.runner.pids) == 1
        bench.runner.stop(0.0)
        await bench.until_answered(1, 1, 2)
        bench.close()
        return bench

    bench = asyncio.run(scene())
    assert bench.reported[-1] == ("stopped", ())
    assert bench.closer.drain_closing(PATIENCE_S)


def test_workers_that_could_not_even_be_asked_for_count_as_stopped_at_once(
    guard: Guard, tmp_path: Path
) -> None:
    async def scene() -> Bench:
        bench = Bench(guard, tmp_path)
        bench.start_in_vain(3)
        bench.runner.stop(1.0)  # as an agent does when a start has failed
        await bench.until("stopped", ())
        bench.close()
        return bench

    bench = asyncio.run(scene())
    assert bench.reported == [("stopped", ())]
    assert not [*tmp_path.glob("*.beat")]


def test_files_that_cannot_be_read_in_time_do_not_keep_a_failure_from_being_told(
    guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file server that hangs."""
    monkeypatch.setattr(runner, "LAST_WORDS_S", 0.05)
    answers = threading.Event()

    def hang(self: WorkerContext, slot: int) -> LastWords:
        answers.wait(PATIENCE_S)
        return LastWords(stderr="too late")

    monkeypatch.setattr(WorkerContext, "last_words", hang)

    async def scene() -> Bench:
        bench = Bench(guard, tmp_path)
        bench.start(1, sys.executable, "-I", "-S", "-c", "raise SystemExit(3)")
        await bench.until("failed", (1, FailureKind.WORKER))
        answers.set()
        bench.runner.stop(0.0)
        await bench.until("stopped", ())
        bench.close()
        return bench

    bench = asyncio.run(scene())
    assert [what for what, _ in bench.reported].count("failed") == 1


def test_a_full_disk_takes_the_journal_and_nothing_else() -> None:
    journal = Journal(Path("/dev/full"))
    journal.write("worker_exited")  # an error here would keep the agent from hearing of the exit
    journal.close()


def test_a_frozen_guard_does_not_keep_workers_running_that_are_to_stop(guard: Guard, tmp_path: Path) -> None:
    async def scene() -> int:
        bench = Bench(guard, tmp_path)
        bench.start(1, sys.executable, "-c", "import time; time.sleep(1000)")
        await bench.until("started", 1)
        worker = os.pidfd_open(bench.runner.pids[0])
        freeze(guard.pid)
        bench.runner.stop(1.0)
        await bench.until("guard lost", -signal.SIGKILL)
        bench.runner.abandon(GuardLost(None))
        return worker

    worker = asyncio.run(scene())
    ended, _, _ = select.select([worker], [], [], PATIENCE_S)
    os.close(worker)
    assert ended


# --- what workers leave ---------------------------------------------------------------------------


class SlowGpus(GpuMemory):
    """A driver that answers when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.answer = threading.Event()

    @property
    def there(self) -> bool:
        return True

    def prepare(self) -> None:
        pass

    def holders(self, pids: Collection[int]) -> list[GpuHolder]:
        self.asked.set()
        assert self.answer.wait(PATIENCE_S)
        return []


def test_the_next_workers_wait_until_what_the_last_ones_left_is_cleared_away(
    guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "CLEAR_LIMIT_S", PATIENCE_S)

    async def scene() -> None:
        bench = Bench(guard, tmp_path)
        gpus = bench.runner._gpu = SlowGpus()
        bench.start(1, sys.executable, "-c", "import time; time.sleep(1000)")
        await bench.until("started", 1)
        bench.runner.stop(0.0)
        assert await asyncio.to_thread(gpus.asked.wait, PATIENCE_S)
        bench.runner.stop(0.0)  # has an answer already, which is on its way
        assert ("stopped", ()) not in bench.reported
        gpus.answer.set()
        await bench.until("stopped", ())
        assert bench.reported == [("started", 1), ("stopped", ())]
        bench.close()

    asyncio.run(scene())


def test_the_next_workers_do_not_wait_long_for_it(
    guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "CLEAR_LIMIT_S", 0.05)

    async def scene() -> None:
        bench = Bench(guard, tmp_path)
        gpus = bench.runner._gpu = SlowGpus()
        bench.start(1, sys.executable, "-c", "")
        await bench.until("succeeded", 1)
        bench.runner._gpu = GpuMemory()
        bench.start(2, sys.executable, "-c", "import time; time.sleep(1000)")
        await bench.until("started", 2)
        gpus.answer.set()  # too late, and about others
        bench.runner.stop(0.0)
        await bench.until("stopped", ())
        assert bench.reported == [("started", 1), ("succeeded", 1), ("started", 2), ("stopped", ())]
        bench.close()

    asyncio.run(scene())
