"""The example under real agents."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cli.support import COMMAND, LONG_LEASE, clean_environment, elastic_agent
from tests.names import unique
from tests.ports import free_port
from tests.waiting import wait_for

EXAMPLE = Path(__file__).parents[2] / "examples" / "survive_ddp.py"

pytestmark = pytest.mark.system


def losses(output: str) -> list[tuple[int, str]]:
    """The step and the loss of each line that rank 0 printed."""
    return [(int(step), loss) for step, loss in re.findall(r"^step=(\d+) loss=(\S+)$", output, re.M)]


def test_a_training_that_fails_on_all_ranks_goes_on_from_memory(tmp_path: Path) -> None:
    def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / name
        folder.mkdir()
        options = ("--state-dir", str(folder), "--nproc-per-node", "2")
        return elastic_agent(
            *options,
            str(EXAMPLE),
            "--steps",
            "30",
            "--checkpoint-dir",
            str(folder),
            *arguments,
            variables=LONG_LEASE,
        )

    undisturbed = run("undisturbed")
    failed = run("failed", "--fail-at", "15", "--checkpoint-every", "1000")
    assert failed.returncode == undisturbed.returncode == 0, failed.stdout + failed.stderr
    assert [step for step, _ in losses(failed.stdout)] == list(range(1, 31))
    assert losses(failed.stdout) == losses(undisturbed.stdout)
    assert "elastic_agent.survive: resumed at step 15 from the memory of 2 of 2 workers" in failed.stderr
    assert not list((tmp_path / "failed").glob("*.pt"))  # there was no checkpoint
    assert "elastic_agent.survive" not in undisturbed.stderr


@pytest.mark.prove
def test_a_node_that_is_left_has_the_state(tmp_path: Path) -> None:
    run_id, endpoint = unique("run"), f"127.0.0.1:{free_port()}"

    def start(node_id: str) -> subprocess.Popen[str]:
        folder = tmp_path / node_id
        folder.mkdir()
        options = ("--rdzv-endpoint", endpoint, "--rdzv-id", run_id, "--node-id", node_id, "--nnodes", "1:2")
        settled = ("--settle", "0.5", "--state-dir", str(folder), "--nproc-per-node", "1")
        script = (str(EXAMPLE), "--steps", "100000", "--checkpoint-every", "1000000")
        command = [*COMMAND, *options, *settled, *script, "--checkpoint-dir", str(folder)]
        with (folder / "out").open("w") as out:
            return subprocess.Popen(
                command, env=clean_environment(), stdout=out, stderr=subprocess.STDOUT, text=True
            )

    def said(node_id: str) -> str:
        return (tmp_path / node_id / "out").read_text()

    with start("a") as a, start("b") as b:
        try:
            wait_for(
                "steps of both",
                lambda: "2 nodes" in said("a") and len(losses(said("a")) + losses(said("b"))) > 50,
            )
            for process in [*psutil.Process(b.pid).children(recursive=True), psutil.Process(b.pid)]:
                os.kill(process.pid, signal.SIGKILL)
            resumed = wait_for(
                "the next world",
                lambda: re.search(r"resumed at step (\d+) from the memory of 1 of 1 workers", said("a")),
            )
            wait_for("a step", lambda: losses(said("a")[resumed.end() :]))
            assert losses(said("a")[resumed.end() :])[0][0] == int(resumed[1]) + 1
            assert int(resumed[1]) > 0
        finally:
            a.send_signal(signal.SIGTERM)
            if b.poll() is None:
                b.kill()


@pytest.mark.prove
def test_the_example_runs_under_torchrun_and_plain_python(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for command, first in (([sys.executable], 1), (torchrun, 11)):
        arguments = [str(EXAMPLE), "--steps", str(first + 9), "--checkpoint-dir", str(tmp_path)]
        environ = clean_environment({"ELASTIC_AGENT_RUN_ID": "example", "OMP_NUM_THREADS": "1"})
        done = subprocess.run(
            [*command, *arguments, "--checkpoint-every", "10"], env=environ, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert [step for step, _ in losses(done.stdout)] == list(range(first, first + 10))
        assert "elastic_agent.survive" not in done.stderr
