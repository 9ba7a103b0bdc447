"""A run is identified by its id, the life of its job, and its command: no agent reports success for what never ran."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.exit_codes import ExitCode
from tests.agent.support import COMMAND, clean_environment
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
OPTIONS = ["--log-format", "console", "--worker-start", "cold"]
SKIPPED = "the run finished: the run has already finished and is not repeated under the same id"


class Folder:
    """A script, and agents that run it with one run id and one state directory."""

    def __init__(self, path: Path, script: str) -> None:
        """Write the script."""
        self.script = path / "train.py"
        self.script.write_text(script)
        self.options = [
            "--state-dir",
            str(path / "state"),
            "--rdzv-id",
            unique("run"),
            "--log-format",
            "console",
        ]

    def run(
        self, *arguments: str, options: tuple[str, ...] = (), job: Mapping[str, str] | None = None
    ) -> str:
        """Run the script to its end with success, and return what the agent said."""
        done = subprocess.run(
            [*COMMAND, *self.options, *options, str(self.script), *arguments],
            env={**clean_environment(), **(job or {})},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == ExitCode.FINISHED, done.stderr
        return done.stderr

    @property
    def trained(self) -> list[str]:
        """The arguments of each training."""
        return self.script.with_name("trained").read_text().splitlines()


USED_AGAIN = [
    ({}, {}, "b", "finished with another command before, in generation 1; a new one starts"),
    # tests/protocol/test_used_run_ids.py decides the same without agents.
    *(
        pytest.param(*row, marks=pytest.mark.prove)
        for row in (
            (JOB, JOB | {"SLURM_JOB_ID": "101"}, "a", "finished in job 100 before, in generation 1"),
            ({}, {}, "a", "a run with this id finished before, in generation 1; a new one starts"),
            (JOB, JOB, "a", "finished before, in generation 1; a new one starts"),
            (JOB, JOB | {"SLURM_RESTART_COUNT": "1"}, "b", "finished with another command before"),
        )
    ),
]


@pytest.mark.parametrize(
    ("first", "second", "arguments", "said"),
    USED_AGAIN,
    ids=["another command", "another job", "no job", "the same step", "a requeued job, another command"],
)
def test_another_run_of_a_used_id_trains(
    tmp_path: Path, first: dict[str, str], second: dict[str, str], arguments: str, said: str
) -> None:
    folder = Folder(tmp_path, SCRIPT)
    folder.run("a", job=first)
    assert said in folder.run(arguments, job=second)
    assert folder.trained == ["a", arguments]


def test_a_step_that_has_finished_is_not_run_again_when_its_job_is_requeued(tmp_path: Path) -> None:
    folder = Folder(tmp_path, SCRIPT)
    folder.run("a", job=JOB)
    assert SKIPPED in folder.run("a", job=JOB | {"SLURM_RESTART_COUNT": "1"})
    assert folder.trained == ["a"]


@pytest.mark.prove
def test_finish_once_holds_for_the_command_that_finished(tmp_path: Path) -> None:
    folder = Folder(tmp_path, SCRIPT)
    folder.run("a")
    assert SKIPPED in folder.run("a", options=("--finish-once",))
    folder.run("b", options=("--finish-once",))
    assert folder.trained == ["a", "b"]


def test_an_agent_with_another_command_than_the_run_on_its_machine_ends_with_an_error(tmp_path: Path) -> None:
    """Without a run id, as two trainings of one script with two configurations are started."""
    folder = Folder(tmp_path, WAITS)
    port = free_port()
    options = ["--state-dir", str(tmp_path / "state"), "--rdzv-endpoint", f"127.0.0.1:{port}"]
    command = [*COMMAND, *options, *OPTIONS, str(folder.script), "--config"]
    env = clean_environment()
    with subprocess.Popen([*command, "small"], env=env, stdout=subprocess.PIPE, text=True) as small:
        assert small.stdout is not None
        assert small.stdout.readline() == "trains --config small\n"
        large = subprocess.run([*command, "large"], env=env, capture_output=True, text=True, check=False)
        assert large.returncode == ExitCode.USAGE, large.stderr
        assert f"given `{folder.script} --config large`, but run " in large.stderr
        assert f" at 127.0.0.1:{port} runs `{folder.script} --config small` on this machine; " in large.stderr
        assert "Traceback" not in large.stderr
        (tmp_path / "finish").touch()
    assert small.returncode == ExitCode.FINISHED


SAYS_THAT_IT_WAITS = """
import sys
from elastic_agent.agent.run_claim import OtherCommandError, RunClaim
from elastic_agent.cli.main import main

take = RunClaim.take

def take_or_say(folder, claimed):
    try:
        return take(folder, claimed)
    except OtherCommandError:
        print("waits", flush=True)
        raise

RunClaim.take = take_or_say
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.prove
def test_a_run_that_waited_for_the_end_of_another_one_has_an_id_of_its_own(tmp_path: Path) -> None:
    """Without a run id: checkpoints are named after it, and those of another configuration are not to be found."""
    folder = Folder(tmp_path, "import os\nprint(os.environ['ELASTIC_AGENT_RUN_ID'], flush=True)\n" + WAITS)
    options = ["--state-dir", str(tmp_path / "state"), "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    command = [*COMMAND, *options, *OPTIONS]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = clean_environment()
    with subprocess.Popen([*command, str(folder.script), "small"], env=env, **pipes) as small:
        first_id = small.stdout.readline()
        command[: len(COMMAND)] = [sys.executable, "-c", SAYS_THAT_IT_WAITS]
        with subprocess.Popen([*command, str(folder.script), "large"], env=env, **pipes) as large:
            assert large.stdout.readline() == "waits\n"
            (tmp_path / "finish").touch()
            second, said = large.communicate()
    assert (small.returncode, large.returncode) == (ExitCode.FINISHED, ExitCode.FINISHED), said
    assert first_id.startswith("run-")
    assert [line for line in second.splitlines() if line.startswith("run-")] != [first_id.strip()]
    assert "with this id" not in said


@pytest.mark.system
def test_a_run_that_has_just_finished_in_a_store_is_no_success_of_the_next_start(tmp_path: Path) -> None:
    """The store remembers a run for a minute after its end; later, the next start is a new run."""
    folder = Folder(tmp_path, SCRIPT)
    endpoint = f"127.0.0.1:{free_port()}"
    serve = [*COMMAND, "serve", "--rdzv-endpoint", endpoint, "--state-dir", str(tmp_path / "served")]
    with subprocess.Popen(serve, env=clean_environment(), stderr=subprocess.PIPE, text=True) as store:
        try:
            assert store.stderr is not None
            assert "serving at" in store.stderr.readline()
            folder.options += ["--rdzv-endpoint", endpoint]
            folder.run("a")
            again = subprocess.run(
                [*COMMAND, *folder.options, str(folder.script), "a"],
                env=clean_environment(),
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            store.kill()
    if folder.trained == ["a"]:
        assert again.returncode == ExitCode.REFUSED
        assert (
            "the run finished before this agent was started; what this agent was given was not"
            in again.stderr
        )
    else:
        assert (again.returncode, folder.trained) == (ExitCode.FINISHED, ["a", "a"])


@pytest.mark.system
@pytest.mark.prove
def test_a_spare_node_of_another_machine_is_told_that_its_arguments_differ(tmp_path: Path) -> None:
    folder = Folder(tmp_path, WAITS)
    options = [*OPTIONS, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", unique("run")]

    def command(node: str) -> list[str]:
        own = [
            "--state-dir",
            str(tmp_path / node),
            "--node-id",
            node,
        ]  # nothing is shared, as between machines
        return [*COMMAND, *options, *own, str(folder.script), f"--of={node}"]

    env = clean_environment()
    with subprocess.Popen(command("n1"), env=env, stdout=subprocess.PIPE, text=True) as runs:
        assert runs.stdout is not None
        assert runs.stdout.readline() == "trains --of=n1\n"
        with subprocess.Popen(command("n2"), env=env, stderr=subprocess.PIPE, text=True) as spare:
            assert spare.stderr is not None
            said = next(
                line for line in spare.stderr if "nodes differ in the arguments of the script" in line
            )
            (tmp_path / "finish").touch()
            spare.communicate()
    assert "--of=n2 on n2; --of=n1 on n1" in said
    assert spare.returncode == ExitCode.REFUSED, "its arguments were not run"


@pytest.mark.system
@pytest.mark.prove
def test_a_node_that_joins_with_another_script_is_named_to_all_nodes(tmp_path: Path) -> None:
    options = [*OPTIONS, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", unique("run")]

    def started(node: str, script: str) -> subprocess.Popen[str]:
        (tmp_path / script).write_text(WAITS)
        own = ["--state-dir", str(tmp_path / node), "--node-id", node, "--nnodes", "1:2"]
        command = [*COMMAND, *options, *own, str(tmp_path / script)]
        return subprocess.Popen(
            command, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    with started("n1", "train.py") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "trains\n"
        with started("n2", "train2.py") as second:
            said = [
                next(line for line in one.stderr or () if "nodes differ" in line) for one in (first, second)
            ]
            (tmp_path / "finish").touch()
            second.communicate()
        first.communicate()
    for line in said:
        assert "the script: train2.py on n2; train.py on n1" in line
        assert "for two runs, give each its own --rdzv-id" in line
