"""CI's check that nothing is left running notices what it must notice."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

TOOL = Path(__file__).parents[2] / "tools" / "run_and_leave_nothing.py"
DAEMON = "setsid sh -c 'echo pid $$; exec sleep 600' & sleep 0.3"


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, TOOL, *options, "--", "bash", "-c", script],
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("script", "code"), [("true", 0), ("exit 7", 7), ("kill -KILL $$", 128 + signal.SIGKILL)]
)
def test_the_exit_code_is_the_commands(script: str, code: int) -> None:
    assert run(script).returncode == code


def test_the_command_starts_with_no_ignored_signals() -> None:
    ignored = re.search(r"^SigIgn:\s+(\S+)", run("cat /proc/self/status").stdout, re.M)
    assert ignored is not None
    # Signals 32 and 33 are the C library's own; what posix_spawn started, as make does, inherits them ignored.
    assert int(ignored[1], 16) & ~(0b11 << 31) == 0


def test_a_child_that_ends_shortly_after_the_command_is_not_reported() -> None:
    assert run("sleep 0.5 & exit 0").returncode == 0


def test_a_leftover_daemon_is_reported_and_killed_and_fails_the_command() -> None:
    result = run(DAEMON, "--grace-s", "0.5")
    pid = int(result.stdout.split()[1])
    assert result.returncode == 1
    assert f"left running: {pid}: sleep 600" in result.stderr
    assert not psutil.pid_exists(pid)


def test_a_command_over_its_time_limit_is_killed_with_its_children() -> None:
    result = run(f"{DAEMON}; sleep 600", "--limit-s", "1")
    assert result.returncode == 124
    assert not psutil.pid_exists(int(result.stdout.split()[1]))
