"""Nothing that tests start outlives them, even if their run is killed."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

from tests.waiting import GUARD_S

TESTS = """
import os, subprocess

def test_it():
    with subprocess.Popen(["setsid", "sleep", "600"]) as process:
        with open({told!r}, "w") as told:
            told.write(str(process.pid))
"""


def test_what_tests_have_started_is_killed_when_their_run_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "told"
    os.mkfifo(told)
    (tmp_path / "test_it.py").write_text(TESTS.format(told=str(told)))
    options = [
        "-q",
        "-c",
        os.devnull,
        "--rootdir",
        str(tmp_path),
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.DEVNULL,
    ) as run:
        started = os.pidfd_open(int(told.read_text()))
        run.kill()
    ended, _, _ = select.select([started], [], [], GUARD_S)
    os.close(started)
    assert ended
