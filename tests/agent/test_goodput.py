"""The goodput of a real run, over two starts of its agent."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

import msgspec
import pytest

from elastic_agent.agent import events
from elastic_agent.agent.reporting import goodput_recorder
from elastic_agent.agent.reporting.goodput_recorder import GoodputFiles, GoodputRecorder
from elastic_agent.agent.reporting.status_files import saved_statuses
from elastic_agent.agent.worker_group.stalls import Progress
from elastic_agent.exit_codes import ExitCode
from elastic_agent.monitoring.goodput import SavedGoodput
from elastic_agent.monitoring.status_text import status_text
from elastic_agent.protocol import Grace, Outcome
from elastic_agent.rendezvous.events import Registered
from elastic_agent.workers.guard.client import Spawned
from tests.agent.support import COMMAND, clean_environment
from tests.names import unique

RUN_ID = unique("shown")

SCRIPT = """
import pathlib, sys, time
from elastic_agent import client

attempts, folder = pathlib.Path(sys.argv[1]), pathlib.Path(__file__).parent
attempt = len(attempts.read_text()) if attempts.exists() else 0
attempts.write_text("x" * (attempt + 1))
first, last = ((1, 40), (21, 60), (41, 80))[attempt]
for step in range(first, last + 1):
    time.sleep(0.05)  # the training
    client.heartbeat(step)
if attempt < 2:
    raise ValueError("bad sample")
"""


def run_once(folder: Path) -> tuple[int, str]:
    options = ["--rdzv-id", RUN_ID, "--node-id", "n1", "--max-restarts", "1", "--log-format", "console"]
    options += ["--worker-start", "cold"]
    done = subprocess.run(
        [
            *COMMAND,
            *options,
            "--state-dir",
            str(folder / "state"),
            str(folder / "train.py"),
            str(folder / "attempts"),
        ],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stderr


def saved(folder: Path) -> SavedGoodput:
    path = folder / "state" / "goodput" / RUN_ID / "n1.json"
    return msgspec.json.decode(path.read_bytes(), type=SavedGoodput)


@pytest.mark.prove
def test_repeated_steps_are_not_part_of_the_goodput_also_after_a_new_start_of_the_agent(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    code, log = run_once(tmp_path)
    assert code == ExitCode.FAILED, log
    first = saved(tmp_path)
    assert first.outcome == "failed"
    assert first.goodput.repeated_s > 0
    assert first.marks[-1][0] == 60

    code, log = run_once(tmp_path)
    assert code == ExitCode.FINISHED, log
    second = saved(tmp_path)
    assert second.outcome == "finished"
    assert second.goodput.repeated_s > first.goodput.repeated_s
    assert second.goodput.training_s > first.goodput.training_s - second.goodput.repeated_s
    assert second.goodput.total_s > first.goodput.total_s
    assert second.goodput.down_s == 0, "it had ended in order"

    line = r"goodput \d+ % over [^:]+: training [^,]+ s, repeated [^,]+ s, starting "
    assert re.search(line, log), log
    (status,) = saved_statuses(tmp_path / "state", RUN_ID)
    assert re.search(line, status_text(status)), status


@pytest.mark.prove
@pytest.mark.parametrize(("first", "is_lost"), [(1, True), (31, False)])
def test_progress_that_was_thrown_away_is_told(tmp_path: Path, first: int, is_lost: bool) -> None:
    (tmp_path / "train.py").write_text(
        SCRIPT.replace("(21, 60)", f"({first}, 60)").replace("attempt < 2", "not attempt")
    )
    code, log = run_once(tmp_path)
    assert code == ExitCode.FINISHED, log
    told = re.findall(
        r"training began again at step (\d+), although it had reached step (\d+): .*checkpoint", log
    )
    assert len(told) == is_lost, log
    assert all(int(step) <= 4 and reached == "40" for step, reached in told)


@pytest.mark.parametrize(
    ("last", "first", "is_told"),
    [([310], 1, True), ([310, 12], 2, False), ([310, 40], 3, True), ([310, 40], 40, False)],
    ids=["lost", "another fold", "another fold, lost", "another fold, resumed"],
)
def test_steps_are_compared_with_the_last_of_the_training_that_was_interrupted(
    tmp_path: Path, last: list[int], first: int, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    step = 0

    async def play() -> None:
        nonlocal step
        files = GoodputFiles(tmp_path, "run", "n1")
        recorder = GoodputRecorder(files, lambda: Progress(1, {0: 2}, {0: step}))
        recorder.on_event(events.AgentStarted("incarnation", 1, 1))
        await recorder._tasks.settle(300.0)
        step = last[0]
        recorder.on_event(Spawned(1, {0: 2}))
        step = last[-1]
        recorder.on_event(events.WorkersStopping(1, "a worker failed", Grace.RESTART))
        recorder.on_event(events.WorkersCleared())
        step = first
        recorder.on_event(Spawned(2, {0: 3}))
        recorder.on_event(events.AgentEnded(Outcome.FINISHED, "done"))
        await recorder.saved(300.0)

    asyncio.run(play())
    told = "".join(capsys.readouterr())
    assert told.count("training began again") == is_told
    assert (f"at step {first}, although it had reached step {last[-1]}: unless" in told) is is_told


def test_a_restart_writes_nothing_before_the_next_workers_run_and_the_end_of_the_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(goodput_recorder, "SAVE_AFTER_S", 1000.0, raising=False)
    file = tmp_path / "goodput" / "run" / "n1.json"

    async def play() -> None:
        recorder = GoodputRecorder(GoodputFiles(tmp_path, "run", "n1"), lambda: None)
        recorder.on_event(events.AgentStarted("incarnation", 1, 1))
        await recorder._tasks.settle(300.0)
        recorder.on_event(Registered("incarnation", 1000.0))
        recorder.on_event(Spawned(1, {0: 2}))
        recorder.on_event(events.WorkersStopping(1, "a worker failed", Grace.RESTART))
        recorder.on_event(events.WorkersCleared())
        recorder.on_event(Spawned(2, {0: 3}))
        await recorder.saved(300.0)
        assert not file.exists()
        recorder.on_event(events.AgentEnded(Outcome.FINISHED, "done"))
        await recorder.saved(300.0)

    asyncio.run(play())
    assert msgspec.json.decode(file.read_bytes(), type=SavedGoodput).outcome == Outcome.FINISHED
