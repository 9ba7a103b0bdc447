"""A run whose output goes to a file or a pipe: its log has the lines of a terminal, and what workers print is kept."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.support import LONG_LEASE, elastic_agent
from tests.workers.test_kept_output import LIMIT, taken

READABLE = re.compile(r"\d\d:\d\d:\d\d\.\d{3} (info|warning) ")
ELSEWHERE = {**LONG_LEASE, "JOURNAL_STREAM": "1:2"}
"""A service whose output is not sent to the journal but into a pipe or a file."""


def through(command: str) -> list[str]:
    """Run a command line of the shell, in which "$@" stands for the run."""
    return ["sh", "-c", command, "sh"]


@pytest.mark.parametrize(
    ("command", "log"),
    [
        ('"$@" 2>&1 | tee log', "log"),
        pytest.param('nohup "$@" > nohup.out 2>&1', "nohup.out", marks=pytest.mark.prove),
        pytest.param('"$@" > job-1.out 2> job-1.err', "job-1.err", marks=pytest.mark.prove),
    ],
    ids=["tee", "nohup", "a job's output file"],
)
def test_a_log_in_a_file_or_pipe_is_as_readable_as_on_a_terminal(
    tmp_path: Path, command: str, log: str
) -> None:
    options = ("--state-dir", str(tmp_path / "state"), "--no-python", "echo", "out of a worker")
    run = ["env", "-C", str(tmp_path), *through(command)]
    done = elastic_agent(*options, variables=ELSEWHERE, under=run)
    lines = (tmp_path / log).read_text().splitlines()
    own = [line for line in lines if "out of a worker" not in line]
    assert done.returncode == 0, lines
    assert len(own) >= 2
    assert all(READABLE.match(line) for line in own), own
    assert "\x1b" not in "".join(own)


def test_json_lines_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    options = ("--state-dir", str(tmp_path / "state"), "--log-format", "json", "--no-python", "true")
    lines = elastic_agent(*options, variables=LONG_LEASE).stderr.splitlines()
    assert {json.loads(line)["level"] for line in lines} <= {"info", "warning"}
    assert lines


def test_output_is_kept_by_worker_in_the_order_in_which_it_was_printed(tmp_path: Path) -> None:
    prints = "for i in 1 2 3; do echo out $i of $LOCAL_RANK; echo err $i of $LOCAL_RANK >&2; done"
    folders = ("--state-dir", str(tmp_path / "state"), "--log-dir", str(tmp_path / "logs"))
    words = (*folders, "--nproc-per-node", "2", "--no-python", "sh", "-c", prints)
    done = elastic_agent(*words, variables=LONG_LEASE, under=through('"$@" 2>&1 | cat'))
    assert done.returncode == 0, done.stderr
    (node,) = (tmp_path / "logs" / "latest" / "latest").iterdir()
    kept = {str(path.relative_to(node)): path.read_text() for path in node.rglob("*") if path.is_file()}
    assert kept == {
        f"{slot}/output.log": "".join(f"out {i} of {slot}\nerr {i} of {slot}\n" for i in (1, 2, 3))
        for slot in (0, 1)
    }


def test_the_limit_is_for_what_is_kept_of_the_console_and_for_no_redirected_file(tmp_path: Path) -> None:
    folders = ("--state-dir", str(tmp_path / "state"), "--log-dir", str(tmp_path / "logs"))
    options = ("--log-limit", "96K", "--redirects", "2")
    words = (*folders, *options, "--no-python", "sh", "-c", "seq 100000; seq 100000 >&2")
    done = elastic_agent(*words, variables=LONG_LEASE)
    assert done.returncode == 0, done.stderr
    (worker,) = (tmp_path / "logs" / "latest" / "latest").glob("*/0")
    printed = "".join(f"{number}\n" for number in range(1, 100001))
    assert done.stdout == (worker / "stderr.log").read_text() == printed
    kept = (worker / "output.log").read_text()
    assert taken(worker / "output.log") <= LIMIT + 8192
    assert kept.startswith("1\n2\n")
    assert kept.endswith("99999\n100000\n")
