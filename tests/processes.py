"""Processes that a test did not start itself: stopped, continued, looked at."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

PATIENCE_S = 10.0


def freeze(pid: int) -> None:
    """SIGSTOP, and return when no thread of the process runs any more; without effect on one that is gone.

    The signal alone stops nothing yet: the process could still answer what it is asked next.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        deadline_s = time.monotonic() + PATIENCE_S
        while not is_frozen(pid):
            assert time.monotonic() < deadline_s, f"process {pid} does not stop"
            time.sleep(0.0005)  # only its parent would be told


def thaw(pid: int) -> None:
    """SIGCONT; without effect on a process that is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def is_frozen(pid: int) -> bool:
    """Whether every thread stands still, or is gone."""
    return all(_state(task) in ("T", "t", "Z", "X") for task in Path(f"/proc/{pid}/task").glob("*/stat"))


def _state(stat: Path) -> str:
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:  # it ended in between
        return "X"


def status_field(pid: int, name: str) -> str:
    """A line of /proc/PID/status."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return value.strip()
    raise AssertionError(f"no {name} in the status of {pid}")
