"""The Lightning example, stopped in the middle and resumed with another number of workers."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from elastic_agent.exit_codes import ExitCode
from elastic_agent.testing.processes import wait_for
from tests.cli.support import COMMAND, clean_environment

DIGITS = Path(__file__).parents[2] / "examples" / "lightning_digits.py"

pytestmark = [pytest.mark.system, pytest.mark.prove]


def start(folder: Path, workers: int) -> subprocess.Popen[str]:
    options = ("--rdzv-id", "digits", "--state-dir", folder / "state", "--nproc-per-node", workers)
    command = [str(part) for part in (*COMMAND, *options, DIGITS, "--root", folder)]
    environ = clean_environment({"OMP_NUM_THREADS": "1"})
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environ, text=True)


def test_the_example_resumes_with_another_number_of_workers(tmp_path: Path) -> None:
    record = tmp_path / "elastic_agent" / "digits"
    record.mkdir(parents=True)
    with start(tmp_path, 2) as first:
        wait_for(
            lambda: (record / "trainings.json").exists() or first.poll() is not None, 100
        )  # an epoch is complete
        first.send_signal(signal.SIGUSR1)
        said, _ = first.communicate()
    assert first.returncode == ExitCode.STOPPED, said
    saved = re.search(r"elastic_agent: notice \(preempted\): saved step (\d+) to (\S+);", said)
    assert saved is not None, said

    with start(tmp_path, 1) as again:
        told, _ = again.communicate()
    assert again.returncode == 0, told
    assert f"Restored all states from the checkpoint at {saved[2]}" in told
    assert re.search(r"^done: accuracy 0\.9\d+ after \d+ steps$", told, re.M), told
