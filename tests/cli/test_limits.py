"""Limits of this user under which nothing could work are named before anything is started."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.cli.support import LONG_LEASE, elastic_agent, refusal
from tests.ports import free_port


def limited(option: str, limit: int) -> list[str]:
    """A command that runs another with a limit of the shell's."""
    return ["bash", "-c", f'ulimit {option} {limit}; exec "$@"', "bash"]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("print('trained')\n")
    return path


def test_too_few_open_files_are_refused_and_the_requested_number_is_enough(
    script: Path, tmp_path: Path
) -> None:
    argv = ["--nproc-per-node", "2", "--tee", "3", "--state-dir", str(tmp_path / "state"), str(script)]
    refused = refusal(*argv, under=limited("-n", 24))
    said = re.fullmatch(
        r"elastic-agent: a process of this user can have only 24 open files; "
        r"expected at least (\d+) for 2 workers: raise the limit .*\n",
        refused,
    )
    assert said is not None, refused
    done = elastic_agent(*argv, variables=LONG_LEASE, under=limited("-n", int(said[1])))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 2


def test_a_server_without_enough_open_files_is_refused(tmp_path: Path) -> None:
    argv = ["serve", "--rdzv-endpoint", f"localhost:{free_port()}", "--state-dir", str(tmp_path)]
    assert "can have only 24 open files; expected" in refusal(*argv, under=limited("-n", 24))


@pytest.mark.parametrize("start", ["serve", "--no-python"])
def test_a_limit_of_the_address_space_is_named_where_torch_cannot_be_loaded(
    start: str, tmp_path: Path
) -> None:
    """Such a limit is not refused at once: these need less of torch than a worker does."""
    state = ["--state-dir", str(tmp_path)]
    argv = {
        "serve": ["serve", *state, "--rdzv-endpoint", f"localhost:{free_port()}"],
        "--no-python": [*state, "--no-python", "true"],
    }
    ended = elastic_agent(*argv[start], under=limited("-v", 300_000))
    assert "before it had imported torch; its address space is limited to 307 MB: ulimit" in ended.stderr
    assert "can have only" not in ended.stderr


def test_an_interpreter_that_this_user_cannot_execute_is_refused(script: Path) -> None:
    """It was started by a user who can, who then became this one."""
    program = (
        "import sys; sys.executable = '/opt/private/python'; from elastic_agent.cli.main import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    refused = refusal(str(script), command=[sys.executable, "-c", program])
    assert "cannot start the guard process: " in refused
    assert "'/opt/private/python'" in refused
