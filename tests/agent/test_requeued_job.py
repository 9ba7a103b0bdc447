"""A Slurm job that is started again while agents of its earlier start still run: it waits for their end.

Slurm does so when the daemon of a node hangs. Tests with a real Slurm are in tests/slurm.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from elastic_agent.exit_codes import ExitCode
from tests.agent.support import Started, started
from tests.waiting import wait_for

pytestmark = pytest.mark.system

SCRIPT = """
import os, pathlib, time
from elastic_agent import client

folder = pathlib.Path(__file__).parent
saved = folder / "checkpoint"
step = int(saved.read_text()) if saved.exists() else 0
print("starts at step", step, flush=True)
while not (folder / "finish").exists():
    step += 1
    if (notice := client.notice()) is not None:
        saved.write_text(str(step))
        print("saved step", step, notice.reason, flush=True)
        client.leave()
    time.sleep(0.02)
"""


def start_of_job(job: str, requeues: int, node: str) -> dict[str, str]:
    """Slurm's variables of a step on one node."""
    again = {"SLURM_RESTART_COUNT": str(requeues)} if requeues else {}
    step = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": node}
    return {**step, **again, "SLURMD_NODENAME": node}


@contextlib.contextmanager
def agent(folder: Path, variables: Mapping[str, str], *options: str) -> Iterator[Started]:
    """An agent that runs the script, and logs to a file named after its node."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    argv = ["--state-dir", str(folder / "state"), "--log-format", "console", *options, str(script)]
    with (
        (folder / f"{variables['SLURMD_NODENAME']}.log").open("w") as log,
        started(*argv, variables=variables, stderr=log) as running,
    ):
        yield running


def test_the_next_start_of_a_job_waits_until_the_one_that_still_runs_has_ended(tmp_path: Path) -> None:
    """Each on a node of its own, so that the endpoints differ."""
    with agent(tmp_path, start_of_job("100", 0, "n1")) as first:
        assert first.line() == "starts at step 0"
        with agent(tmp_path, start_of_job("100", 1, "n2")) as second:
            log = tmp_path / "n2.log"
            wait_for("the second start waits", lambda: "an earlier start of job 100" in log.read_text())
            first.process.send_signal(signal.SIGUSR1)
            step = first.line().split()[2]
            assert second.line() == f"starts at step {step}"
            assert first.process.wait() == ExitCode.STOPPED
            (tmp_path / "finish").touch()
            assert second.process.wait() == ExitCode.FINISHED
    assert log.read_text().count("an earlier start of job 100 still runs at a standalone endpoint on ") == 1


def test_an_earlier_start_that_does_not_stop_is_named_when_the_time_to_join_is_over(tmp_path: Path) -> None:
    with agent(tmp_path, start_of_job("100", 0, "n1")) as first:
        assert first.line() == "starts at step 0"
        first.process.send_signal(signal.SIGSTOP)
        with agent(tmp_path, start_of_job("100", 1, "n2"), "--join-timeout", "1") as second:
            assert second.process.wait() == ExitCode.USAGE
    said = (tmp_path / "n2.log").read_text()
    assert "an earlier start of job 100 still runs at a standalone endpoint on " in said
    assert " after 1 s (--join-timeout); end its agents, then requeue" in said
    (claim,) = (tmp_path / "state").glob("nodes/*/=endpoint.lock")
    assert f"; if that machine is dead, remove {claim}" in said
