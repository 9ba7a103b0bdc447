"""A run is identified by its id, the life of its job, and its command: no agent reports success for what never ran."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from elastic_agent.exit_codes import ExitCode
from tests.agent.support import elastic_agent, started
from tests.names import unique
from tests.ports import free_port

SCRIPT = """
import pathlib, sys
with open(pathlib.Path(__file__).with_name("trained"), "a") as trained:
    print(*sys.argv[1:], file=trained)
"""
WAITS = """
import pathlib, sys, time
print("trains", *sys.argv[1:], flush=True)
while not pathlib.Path(__file__).with_name("finish").exists():
    time.sleep(0.05)
"""
JOB = {
    "SLURM_JOB_ID": "100",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n1",
    "SLURMD_NODENAME": "n1",
}
READABLE = ("--log-format", "console")
SKIPPED = "the run finished: the run has already finished and is not repeated under the same id"


class Folder:
    """A script, and agents that run it with one run id and one state directory."""

    def __init__(self, path: Path, script: str) -> None:
        """Write the script."""
        self.script = path / "train.py"
        self.script.write_text(script)
        self.options = ["--state-dir", str(path / "state"), "--rdzv-id", unique("run"), *READABLE]

    def run(self, *arguments: str, job: Mapping[str, str] | None = None) -> str:
        """Run the script to its end with success, and return what the agent said."""
        done = elastic_agent(*self.options, str(self.script), *arguments, variables=job)
        assert done.returncode == ExitCode.FINISHED, done.stderr
        return done.stderr

    @property
    def trained(self) -> list[str]:
        """The arguments of each training."""
        return self.script.with_name("trained").read_text().splitlines()


def test_another_command_with_a_used_id_trains(tmp_path: Path) -> None:
    """tests/protocol/test_used_run_ids.py decides on the other kinds of runs without agents."""
    folder = Folder(tmp_path, SCRIPT)
    folder.run("a")
    assert "finished with another command before, in generation 1; a new one starts" in folder.run("b")
    assert folder.trained == ["a", "b"]


def test_a_step_that_has_finished_is_not_run_again_when_its_job_is_requeued(tmp_path: Path) -> None:
    folder = Folder(tmp_path, SCRIPT)
    folder.run("a", job=JOB)
    assert SKIPPED in folder.run("a", job=JOB | {"SLURM_RESTART_COUNT": "1"})
    assert folder.trained == ["a"]


def test_an_agent_with_another_command_than_the_run_on_its_machine_ends_with_an_error(tmp_path: Path) -> None:
    """Without a run id, as two trainings of one script with two configurations are started."""
    folder = Folder(tmp_path, WAITS)
    port = free_port()
    argv = ["--state-dir", str(tmp_path / "state"), "--rdzv-endpoint", f"127.0.0.1:{port}", *READABLE]
    argv += [str(folder.script), "--config"]
    with started(*argv, "small") as small:
        assert small.line() == "trains --config small"
        large = elastic_agent(*argv, "large")
        assert large.returncode == ExitCode.USAGE, large.stderr
        assert f"given `{folder.script} --config large`, but run " in large.stderr
        assert f" at 127.0.0.1:{port} runs `{folder.script} --config small` on this machine; " in large.stderr
        assert "Traceback" not in large.stderr
        (tmp_path / "finish").touch()
        assert small.end()[0] == ExitCode.FINISHED


SAYS_THAT_IT_WAITS = """
import sys
from elastic_agent.agent.run_claim import Claim, OtherCommandError
from elastic_agent.cli.main import main

take = Claim.take

def take_or_say(claim, folder):
    try:
        return take(claim, folder)
    except OtherCommandError:
        print("waits", flush=True)
        raise

Claim.take = take_or_say
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.prove
def test_a_run_that_waited_for_the_end_of_another_one_has_an_id_of_its_own(tmp_path: Path) -> None:
    """Without a run id: checkpoints are named after it, and those of another configuration are not to be found."""
    folder = Folder(tmp_path, "import os\nprint(os.environ['ELASTIC_AGENT_RUN_ID'], flush=True)\n" + WAITS)
    argv = ["--state-dir", str(tmp_path / "state"), "--rdzv-endpoint", f"127.0.0.1:{free_port()}", *READABLE]
    says_that_it_waits = [sys.executable, "-c", SAYS_THAT_IT_WAITS]
    with started(*argv, str(folder.script), "small") as small:
        first_id = small.line()
        with started(*argv, str(folder.script), "large", command=says_that_it_waits) as large:
            assert large.line() == "waits"
            (tmp_path / "finish").touch()
            second_id = next(line for line in iter(large.line, "") if line != "waits")
            code, said = large.end()
        assert (small.end()[0], code) == (ExitCode.FINISHED, ExitCode.FINISHED), said
    assert first_id.startswith("run-")
    assert second_id.startswith("run-")
    assert first_id != second_id
    assert "with this id" not in said


@pytest.mark.system
def test_a_run_that_has_just_finished_in_a_store_is_no_success_of_the_next_start(tmp_path: Path) -> None:
    """The store remembers a run for a minute after its end; later, the next start is a new run."""
    folder = Folder(tmp_path, SCRIPT)
    endpoint = f"127.0.0.1:{free_port()}"
    with started("serve", "--rdzv-endpoint", endpoint, "--state-dir", str(tmp_path / "served")) as store:
        store.log_until("serving at")
        folder.options += ["--rdzv-endpoint", endpoint]
        folder.run("a")
        again = elastic_agent(*folder.options, str(folder.script), "a")
    if folder.trained == ["a"]:
        assert again.returncode == ExitCode.REFUSED
        refused = "the run finished before this agent was started; what this agent was given was not"
        assert refused in again.stderr
    else:
        assert (again.returncode, folder.trained) == (ExitCode.FINISHED, ["a", "a"])
