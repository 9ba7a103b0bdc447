"""The runner of a node's workers, on a real guard."""

from __future__ import annotations

import asyncio
import os
import secrets
import select
import signal
import sys
import threading
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from elastic_agent.agent import events
from elastic_agent.agent.reporting.event_log import EventLog
from elastic_agent.agent.worker_group import generation
from elastic_agent.agent.worker_group.collectives import Collectives
from elastic_agent.agent.worker_group.interruptions import StopSignals
from elastic_agent.agent.worker_group.runner import Runner
from elastic_agent.agent.worker_group.warm_start import Guards
from elastic_agent.client._cells import HeartbeatFile
from elastic_agent.config.settings import Settings
from elastic_agent.linux import boottime_s
from elastic_agent.protocol import Grace
from elastic_agent.protocol.records import Cause, FailureKind, Notice
from elastic_agent.testing.processes import freeze
from elastic_agent.workers import cleanup
from elastic_agent.workers.cleanup import Cleanup, SharedMemorySweep, SweepReport
from elastic_agent.workers.context import BackgroundCloser, WorkerContext
from elastic_agent.workers.end import WorkerEnd
from elastic_agent.workers.guard.client import Guard, GuardEvent, GuardLost, Signalled, Spawned
from elastic_agent.workers.output.generation_logs import GenerationLogs
from tests.agent.support import asynchronous
from tests.waiting import wait_for_async

PATIENCE_S = 60.0


SLEEPS = ("-I", "-S", "-c", "import time; time.sleep(1000)")


class Unprintable:
    def __str__(self) -> str:
        raise ValueError("no argument")


class Bench:
    """A runner, and what it reported, in order."""

    def __init__(
        self, guard: Guard, folder: Path, collectives: Collectives | None = None, shutdown_s: float = 1.0
    ) -> None:
        self.guard = guard
        self.folder = folder
        self.closer = BackgroundCloser()
        self.reported: list[tuple[str, object]] = []
        self._news = asyncio.Event()
        self.stop_signals = StopSignals([signal.SIGUSR1, signal.SIGTERM])
        self._read_events, guard.read_events = guard.read_events, self._noted_events  # type: ignore[method-assign]
        self.runner = Runner(
            Guards(guard, Guard.start),
            "n1",
            Settings(shutdown_timeout=shutdown_s, restart_idle=1.0, hang_timeout=0.0),
            self.stop_signals,
            collectives or Collectives(),
        )
        self.runner.listen(self._report, asyncio.create_task)

    def _report(self, event: events.Event) -> None:
        match event:
            case Spawned(generation=generation):
                self._note("started", generation)
            case events.WorkersFailed(generation=generation, failure=failure):
                self._note("failed", (generation, failure.kind))
            case events.WorkersSucceeded(generation=generation):
                self._note("succeeded", generation)
            case events.WorkersSaved(generation=generation):
                self._note("saved", generation)
            case events.NoticesHandled(generation=generation):
                self._note("handles notices", generation)
            case events.WorkersInterrupted(generation=generation, failure=failure):
                self._note("interrupted", (generation, failure.summary))
            case events.WorkersCleared(unkillable=unkillable, parked=0):
                self._note("stopped", unkillable)
            case events.WorkersCleared(parked=parked):
                self._note("parked", parked)
            case events.WarmedUp(again=again):
                self._note("warm", again)
            case GuardLost(returncode=returncode):
                self._note("guard lost", returncode)

    def _noted_events(self) -> list[GuardEvent]:
        """The guard's events; notes signals, which are not reported, when they have been handled."""
        found = self._read_events()
        for event in found:
            if isinstance(event, Signalled):
                asyncio.get_running_loop().call_soon(self._note, "signalled", event.signum)
        return found

    def _note(self, what: str, detail: object) -> None:
        self.reported.append((what, detail))
        self._news.set()

    def start(self, generation: int, program: str, *arguments: object, apart: bool = False) -> None:
        parked = self.runner.parked
        beats = HeartbeatFile.create(self.folder, 1) if parked is None else parked.heartbeats
        variables = {
            "ELASTIC_AGENT_RUN_ID": "run",
            "ELASTIC_AGENT_NODE_ID": "n1",
            "ELASTIC_AGENT_GENERATION": str(generation),
            "ELASTIC_AGENT_HEARTBEAT": beats.path,
            "ELASTIC_AGENT_SLOT": "0",
        }
        logs = GenerationLogs(str(self.folder / "logs"))
        context = WorkerContext(
            self.guard,
            -generation if apart else generation,
            "w",
            program,
            {0: arguments},
            {0: variables},
            logs,
            self.closer,
        )
        context.parked = {} if parked is None else dict(parked.pids)
        self.runner.start(context, beats, apart=apart)

    async def begin(self, generation: int, *program: object) -> None:
        """Start a Python program, and wait until it runs."""
        self.start(generation, sys.executable, *program)
        await self.until("started", generation)

    @property
    def ends(self) -> list[str]:
        """What was reported of the workers' ends."""
        return [what for what, _ in self.reported if what not in ("started", "handles notices", "signalled")]

    async def until(self, what: str, detail: object) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (what, detail) not in self.reported:
                self._news.clear()
                await self._news.wait()

    @property
    def pids(self) -> list[int]:
        """The workers that run."""
        return [*self.runner.progress.pids.values()] if self.runner.progress is not None else []

    def close(self) -> None:
        guard = self.runner.guards.present
        self.runner.close()
        if guard is not self.guard:
            guard.close()


@pytest.fixture
def guard() -> Iterator[Guard]:
    guard = Guard.start(kill_patience_s=1.0)
    guard.set_deadline(boottime_s() + 1000)
    yield guard
    guard.close()


@pytest.mark.parametrize("argument", ["", Unprintable()], ids=["by the guard", "before it is asked"])
@asynchronous
async def test_a_stop_after_a_failed_start_is_answered_and_does_not_end_the_next_generation(
    guard: Guard, tmp_path: Path, argument: object
) -> None:
    bench = Bench(guard, tmp_path)
    bench.start(1, str(tmp_path / "no-such-program"), argument)
    await bench.until("failed", (1, FailureKind.START))
    bench.runner.stop(Grace.DRAIN)
    await bench.until("stopped", ())
    bench.runner.stop(Grace.DRAIN)  # as an agent does that heard of the failure before it heard of the stop
    await bench.begin(2, *SLEEPS)
    assert bench.reported.count(("stopped", ())) == 1, "generation 2 was taken for stopped"
    assert len(bench.pids) == 1
    bench.runner.stop(Grace.NONE)
    async with asyncio.timeout(PATIENCE_S):
        while bench.reported.count(("stopped", ())) < 2:
            await asyncio.sleep(0)
    bench.close()
    assert bench.closer.drain_closing(PATIENCE_S)
    assert not [*tmp_path.glob("*.beat")]


@asynchronous
async def test_a_failure_is_reported_if_the_workers_files_cannot_be_read_in_time(
    guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file server that hangs."""
    monkeypatch.setattr(generation, "FINAL_OUTPUT_S", 0.05)
    answers = threading.Event()

    def hang(self: WorkerContext, end: WorkerEnd) -> WorkerEnd:
        answers.wait(PATIENCE_S)
        return replace(end, stderr_tail="too late")

    monkeypatch.setattr(WorkerContext, "with_files", hang)
    bench = Bench(guard, tmp_path)
    bench.start(1, sys.executable, "-I", "-S", "-c", "raise SystemExit(3)")
    await bench.until("failed", (1, FailureKind.WORKER))
    answers.set()
    bench.runner.stop(Grace.NONE)
    await bench.until("stopped", ())
    bench.close()
    assert [what for what, _ in bench.reported].count("failed") == 1


HANDLES_A_SIGNAL = """
import pathlib, signal, sys

saved = pathlib.Path(sys.argv[1])
if sys.argv[2] == "handles":
    signal.signal(signal.SIGUSR1, lambda *_: (saved.write_text("saved"), sys.exit(0)))
pathlib.Path(sys.argv[1] + "-ready").touch()
signal.pause()
"""


@pytest.mark.parametrize(
    ("handles", "cause", "told"),
    [("handles", Cause.PREEMPTED, 1), ("does not", Cause.PREEMPTED, 0), ("handles", Cause.DRAIN, 0)],
)
@asynchronous
async def test_a_worker_that_handles_only_the_notice_signal_gets_it_when_the_run_is_to_save_and_end(
    handles: str, cause: Cause, told: int, guard: Guard, tmp_path: Path
) -> None:
    bench = Bench(guard, tmp_path)
    await bench.begin(1, "-c", HANDLES_A_SIGNAL, tmp_path / "file", handles)
    await wait_for_async("the worker", (tmp_path / "file-ready").exists)
    found = bench.runner.notify(Notice(1, cause, 3600.0, "SIGUSR1 on n1", ends=True), boottime_s() + 3600.0)
    if told:
        summary = "worker n1/0 exited with code 0 after SIGUSR1, which its agent sent"
        await bench.until("interrupted", (1, summary))
        await bench.until("saved", 1)
    else:
        bench.runner.stop(Grace.DRAIN)
        await bench.until("stopped", ())
    bench.close()
    assert (found.is_delivered, found.told) == (True, told)
    assert (tmp_path / "file").exists() == bool(told)


def test_a_full_disk_affects_only_the_event_log() -> None:
    event_log = EventLog(Path("/dev/full"))
    event_log.write("worker_exited")  # an error here would keep the agent from hearing of the exit
    event_log.close()


@asynchronous
async def test_workers_are_stopped_even_if_the_guard_is_frozen(guard: Guard, tmp_path: Path) -> None:
    bench = Bench(guard, tmp_path)
    await bench.begin(1, *SLEEPS)
    worker = os.pidfd_open(bench.pids[0])
    freeze(guard.pid)
    bench.runner.stop(Grace.DRAIN)
    await bench.until("guard lost", -signal.SIGKILL)
    await bench.until("stopped", ())
    bench.close()
    ended, _, _ = select.select([worker], [], [], PATIENCE_S)
    os.close(worker)
    assert ended


# --- signals that ask the agent to stop, and reach more than the agent -----------------------------

ENDS_ON_A_SIGNAL = """
import signal, sys, time
for signum in map(int, sys.argv[3:]):
    signal.signal(signum, lambda *_: sys.exit(int(sys.argv[2])))
if str(int(signal.SIGUSR1)) not in sys.argv[3:]:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
open(sys.argv[1], "w").close()
time.sleep(1000)
"""


@pytest.mark.parametrize("agent_gets_it", ["before", "after", "never"])
@asynchronous
async def test_a_worker_killed_by_a_signal_that_its_agent_received_has_not_failed(
    guard: Guard, tmp_path: Path, agent_gets_it: str
) -> None:
    bench = Bench(guard, tmp_path)
    await bench.begin(1, *SLEEPS)
    if agent_gets_it == "before":
        bench.stop_signals.receive(signal.SIGUSR1)
    os.kill(bench.pids[0], signal.SIGUSR1)
    if agent_gets_it == "after":
        bench.stop_signals.receive(signal.SIGUSR1)
    if agent_gets_it == "never":
        await bench.until("failed", (1, FailureKind.WORKER))
        bench.runner.stop(Grace.NONE)
        await bench.until("stopped", ())
    else:
        await bench.until("saved", 1)
    bench.close()
    assert bench.ends == (["failed", "stopped"] if agent_gets_it == "never" else ["interrupted", "saved"])
    if agent_gets_it != "never":
        words = "worker n1/0 was terminated by SIGUSR1, which the agent also received"
        assert ("interrupted", (1, words)) in bench.reported


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize(
    ("ends_it", "reaches_all", "is_interrupted"),
    [(signal.SIGUSR1, True, True), (signal.SIGUSR1, False, False), (signal.SIGUSR2, True, False)],
    ids=["it exits on it", "for the agent alone", "ignored"],
)
@asynchronous
async def test_only_a_worker_that_exits_on_such_a_signal_has_neither_succeeded_nor_failed(
    guard: Guard, tmp_path: Path, code: int, ends_it: signal.Signals, reaches_all: bool, is_interrupted: bool
) -> None:
    """One that did not get it has finished its training meanwhile: started again, it would do the same."""
    bench = Bench(guard, tmp_path)
    gate = tmp_path / "gate"
    await bench.begin(1, "-I", "-S", "-c", ENDS_ON_A_SIGNAL, gate, code, int(ends_it))
    (worker,) = bench.pids
    await wait_for_async("the worker", gate.exists)
    bench.stop_signals.receive(signal.SIGUSR1)
    if reaches_all:
        os.kill(guard.pid, signal.SIGUSR1)
        await bench.until("signalled", signal.SIGUSR1)  # what a worker that is gone ignored is not known
    for signum in dict.fromkeys((signal.SIGUSR1, ends_it) if reaches_all else (ends_it,)):
        os.kill(worker, signum)
    if code and not is_interrupted:
        await bench.until("failed", (1, FailureKind.WORKER))
        bench.runner.stop(Grace.NONE)
    end = "saved" if is_interrupted else "stopped" if code else "succeeded"
    await bench.until(end, () if end == "stopped" else 1)
    bench.close()
    assert bench.ends == {"saved": ["interrupted", "saved"], "stopped": ["failed", "stopped"]}.get(end, [end])


# --- what workers leave ---------------------------------------------------------------------------


class SlowSweep(SharedMemorySweep):
    """A sweep that ends when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.may_end = threading.Event()

    def candidates(self) -> list[str]:
        return ["left"]

    def sweep(self) -> SweepReport:
        self.begun.set()
        assert self.may_end.wait(PATIENCE_S)
        return SweepReport()


@asynchronous
async def test_the_next_workers_wait_for_the_cleanup_of_the_last_generation(
    guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "CLEANUP_LIMIT_S", PATIENCE_S)
    bench = Bench(guard, tmp_path)
    sweep = SlowSweep()
    monkeypatch.setattr(generation, "Cleanup", partial(Cleanup, sweep=sweep))
    await bench.begin(1, *SLEEPS)
    bench.runner.stop(Grace.NONE)
    assert await asyncio.to_thread(sweep.begun.wait, PATIENCE_S)
    bench.runner.stop(Grace.NONE)  # has an answer already, which is on its way
    assert ("stopped", ()) not in bench.reported
    sweep.may_end.set()
    await bench.until("stopped", ())
    assert bench.reported == [("started", 1), ("stopped", ())]
    bench.close()


@asynchronous
async def test_the_wait_for_the_cleanup_is_limited(
    guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "CLEANUP_LIMIT_S", 0.05)
    bench = Bench(guard, tmp_path)
    sweep = SlowSweep()
    monkeypatch.setattr(generation, "Cleanup", partial(Cleanup, sweep=sweep))
    bench.start(1, sys.executable, "-c", "")
    await bench.until("succeeded", 1)
    monkeypatch.setattr(generation, "Cleanup", Cleanup)
    await bench.begin(2, *SLEEPS)
    sweep.may_end.set()  # too late, and about others
    bench.runner.stop(Grace.NONE)
    await bench.until("stopped", ())
    assert bench.reported == [("started", 1), ("succeeded", 1), ("started", 2), ("stopped", ())]
    bench.close()


HOLDS_SHARED_MEMORY = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory, seen = sys.argv[1:]
held = open(memory, "x")
while not os.path.exists(seen):
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


@asynchronous
async def test_shared_memory_that_workers_held_when_they_were_stopped_is_removed(
    guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tests/workers/test_cleanup.py says which files are removed, and which are not."""
    monkeypatch.setattr(cleanup, "INSPECT_EVERY_S", PATIENCE_S)
    bench = Bench(guard, tmp_path, shutdown_s=PATIENCE_S)
    memory, seen = Path(f"/dev/shm/psm_{secrets.token_hex(4)}"), tmp_path / "seen"
    await bench.begin(1, "-I", "-S", "-c", HOLDS_SHARED_MEMORY, memory, seen)
    await wait_for_async("the worker", memory.exists)
    note = SharedMemorySweep.note

    def noting(sweep: SharedMemorySweep, pids: Collection[int]) -> None:
        note(sweep, pids)
        seen.touch()

    monkeypatch.setattr(SharedMemorySweep, "note", noting)
    bench.runner.stop(Grace.DRAIN)
    await bench.until("stopped", ())
    bench.close()
    assert not memory.exists()
    assert f"removed shared memory left behind by workers files=('{memory.name}',)" in "".join(
        capsys.readouterr()
    )


@pytest.mark.parametrize("is_fenced", [False, True])
@asynchronous
async def test_the_file_over_which_workers_met_stays_if_other_nodes_may_meet_over_it_again(
    guard: Guard, tmp_path: Path, is_fenced: bool
) -> None:
    meeting_file = tmp_path / "meeting"
    meeting_file.touch()
    collectives = Collectives()
    bench = Bench(guard, tmp_path, collectives)
    await bench.begin(1, *SLEEPS)
    collectives.meeting_files.add(str(meeting_file))
    if is_fenced:
        guard.set_deadline(boottime_s())
    else:
        bench.runner.stop(Grace.NONE)
    await bench.until("stopped", ())
    bench.close()
    assert meeting_file.exists() == is_fenced
