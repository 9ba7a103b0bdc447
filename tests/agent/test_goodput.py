"""The goodput of a real run, and the warning of training that begins again."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

import pytest

from elastic_agent.agent import events
from elastic_agent.agent.reporting.goodput_recorder import GoodputRecorder
from elastic_agent.agent.reporting.status_files import saved_statuses
from elastic_agent.agent.worker_group.stalls import Progress
from elastic_agent.exit_codes import ExitCode
from elastic_agent.monitoring.status_text import status_text
from elastic_agent.protocol import Grace
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
first, last = ((1, 40), (21, 60))[attempt]
for step in range(first, last + 1):
    time.sleep(0.05)  # the training
    client.heartbeat(step)
if not attempt:
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


@pytest.mark.prove
def test_the_goodput_is_logged_at_the_end_and_in_the_saved_status(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    code, log = run_once(tmp_path)
    assert code == ExitCode.FINISHED, log
    line = r"goodput \d+ % over [^:]+: training \d"
    assert len(re.findall(line, log)) == 1, log
    (status,) = saved_statuses(tmp_path / "state", RUN_ID)
    assert re.search(line, status_text(status)), status


@pytest.mark.prove
@pytest.mark.parametrize(("first", "is_lost"), [(1, True), (31, False)])
def test_progress_that_was_thrown_away_is_told(tmp_path: Path, first: int, is_lost: bool) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("(21, 60)", f"({first}, 60)"))
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
    last: list[int], first: int, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    step = 0

    async def play() -> None:
        nonlocal step
        recorder = GoodputRecorder(lambda: Progress(1, {0: 2}, {0: step}))
        step = last[0]
        recorder.on_event(Spawned(1, {0: 2}))
        step = last[-1]
        recorder.on_event(events.WorkersStopping(1, "a worker failed", Grace.RESTART))
        recorder.on_event(events.WorkersCleared())
        step = first
        recorder.on_event(Spawned(2, {0: 3}))
        recorder.close()

    asyncio.run(play())
    told = "".join(capsys.readouterr())
    assert told.count("training began again") == is_told
    assert (f"at step {first}, although it had reached step {last[-1]}: unless" in told) is is_told
