"""What the workers of a run print is kept without an option, and limited by one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.support import LONG_LEASE, elastic_agent

BOTH = ["sh", "-c", '"$@" 2>&1 | cat', "sh"]
PRINTS = "for i in 1 2 3; do echo out $i of $LOCAL_RANK; echo err $i of $LOCAL_RANK >&2; done"


def kept_by(folder: Path, script: str, *options: str, under: list[str] = BOTH) -> dict[str, str]:
    """Run the script of a shell in two workers; return the content of all files below the log directory."""
    own = ("--state-dir", str(folder / "state"), "--log-dir", str(folder / "logs"), "--nproc-per-node", "2")
    done = elastic_agent(*own, *options, "--no-python", "sh", "-c", script, variables=LONG_LEASE, under=under)
    assert done.returncode == 0, done.stderr
    (node,) = (folder / "logs" / "latest" / "latest").iterdir()
    return {str(path.relative_to(node)): path.read_text() for path in node.rglob("*") if path.is_file()}


def test_output_is_kept_by_worker_in_the_order_in_which_it_was_printed(tmp_path: Path) -> None:
    words = ["".join(f"out {i} of {slot}\nerr {i} of {slot}\n" for i in (1, 2, 3)) for slot in (0, 1)]
    assert kept_by(tmp_path, PRINTS) == {"0/output.log": words[0], "1/output.log": words[1]}


@pytest.mark.prove
def test_the_limit_of_the_user_holds_and_redirected_output_is_not_kept_twice(tmp_path: Path) -> None:
    script = "seq 100000 >&$((2 - LOCAL_RANK))"
    kept = kept_by(tmp_path, script, "--log-limit", "96K", "--redirects", "2")
    assert set(kept) == {"0/stderr.log", "1/stderr.log", "1/output.log"}
    assert kept["1/stderr.log"] == ""
    assert kept["1/output.log"].startswith("1\n2\n")
    assert kept["1/output.log"].endswith("100000\n")
    (path,) = (tmp_path / "logs").glob("run-*/000001/*/1/output.log")
    assert path.stat().st_blocks * 512 <= 96 * 1024 + 8192 < os.path.getsize(path)
