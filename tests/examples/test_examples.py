"""The examples do what their first lines say, under plain python and under torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.client.support import launched

EXAMPLES = Path(__file__).parents[2] / "examples"
DIGITS = EXAMPLES / "digits_ddp.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")

pytestmark = [pytest.mark.system, pytest.mark.prove]


def surroundings(run_id: str) -> dict[str, str]:
    return launched({"OMP_NUM_THREADS": "1", "ELASTIC_AGENT_RUN_ID": run_id})


def run(*command: object, run_id: str = "examples", expect: int = 0) -> str:
    """The command's output, after it ended with the exit code `expect`."""
    words = [str(part) for part in command]
    done = subprocess.run(
        words, env=surroundings(run_id), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == expect, done.stdout
    return done.stdout


def losses(output: str) -> dict[int, float]:
    """Step to loss, as the digits example reports them."""
    return {
        int(step): float(loss)
        for step, loss in re.findall(r"^digits: step=(\d+)/\d+ loss=(\S+)", output, re.M)
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the digits example says when one process trains from start to end."""
    return run(sys.executable, DIGITS, "--checkpoint-dir", tmp_path_factory.mktemp("undisturbed"))


def test_digits_are_learned(undisturbed: str) -> None:
    accuracy = re.search(r"^digits: done accuracy=(\S+)", undisturbed, re.M)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.93


def test_the_result_does_not_depend_on_the_number_of_workers(undisturbed: str, tmp_path: Path) -> None:
    # Three do not divide the batch of 64: the parts differ in size.
    output = run(*TORCHRUN, 3, DIGITS, "--checkpoint-dir", tmp_path, "--steps", 100)
    together = losses(output)
    alone = losses(undisturbed)
    assert set(together) == {1, 20, 40, 60, 80, 100}
    assert together == pytest.approx({step: alone[step] for step in together}, abs=2e-3)


def test_killed_training_resumes_from_its_checkpoint(undisturbed: str, tmp_path: Path) -> None:
    options = ("--checkpoint-every", "10", "--steps", "60", "--log-every", "5", "--step-time", "0.02")
    command = [sys.executable, str(DIGITS), "--checkpoint-dir", str(tmp_path), *options]
    with subprocess.Popen(command, env=surroundings("a/b"), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("digits: step=25/"):
                break
        process.kill()

    # With another number of workers, and a run id that could not name a file as it is.
    output = run(*TORCHRUN, 2, DIGITS, "--checkpoint-dir", tmp_path, "--steps", 60, run_id="a/b")

    resumed = re.search(r"^digits: resumed step=(\d+)/60", output, re.M)
    assert resumed is not None, output
    assert int(resumed[1]) in (20, 30)
    alone = losses(undisturbed)
    assert losses(output)[60] == pytest.approx(alone[60], abs=2e-3)


def test_a_missed_target_fails(tmp_path: Path) -> None:
    output = run(
        sys.executable, DIGITS, "--checkpoint-dir", tmp_path, "--steps", 3, "--target-accuracy", 0.9, expect=1
    )
    assert re.search(r"^accuracy 0\.\d+ is below the target of 0.9$", output, re.M)


def test_hello_adds_up_the_ranks() -> None:
    output = run(*TORCHRUN, 2, EXAMPLES / "hello.py")
    for rank in range(2):
        assert f"hello from rank {rank} of 2; our ranks add up to 1" in output
