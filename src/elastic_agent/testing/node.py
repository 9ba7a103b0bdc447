"""One node: its agent as a process with all its descendants, and the faults that can hit it."""

from __future__ import annotations

import os
import signal as signals
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from elastic_agent import linux

FREEZE_TIMEOUT_S = 10.0


@dataclass
class NodeProcess:
    """A running agent, which represents a node."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    """Where this agent's part of the log begins; an earlier one of that name may have written before."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def runs(self) -> bool:
        """Whether the agent has not ended yet."""
        return self.process.poll() is None

    @property
    def guard(self) -> int:
        """The guard's pid."""
        return next(pid for pid in linux.children(self.pid) if _command(pid).find(b"workers/guard/") >= 0)

    def said(self) -> str:
        """Return what this agent (and its workers) wrote to the console so far."""
        return self.log.read_bytes()[self.log_start :].decode(errors="replace")

    def lines(self, *texts: str) -> list[str]:
        """Return the log lines that contain all of these texts."""
        return [line for line in self.said().splitlines() if all(text in line for text in texts)]

    def kill_agent(self) -> None:
        """Send SIGKILL to the agent alone."""
        os.kill(self.pid, signals.SIGKILL)

    def kill_node(self) -> None:
        """Kill all processes at once, as a power cut would."""
        for pid in self.freeze_node():  # no process reacts before all are dead
            linux.send_signal(pid, signals.SIGKILL)

    def freeze_agent(self) -> None:
        """Send SIGSTOP to the agent alone."""
        freeze(self.pid)

    def freeze_node(self) -> list[int]:
        """Stop all processes, as when a virtual machine is paused, and what they fork meanwhile; returns them."""
        stopped: dict[int, None] = {}
        while new := [pid for pid in (self.pid, *_below(self.pid)) if pid not in stopped]:
            for pid in new:
                freeze(pid)
                stopped[pid] = None
        return list(stopped)

    def thaw(self) -> None:
        """Send SIGCONT to all processes."""
        for pid in (self.pid, *_below(self.pid)):
            thaw(pid)

    def terminate(self) -> None:
        """Send SIGTERM to the agent: the node leaves."""
        os.kill(self.pid, signals.SIGTERM)

    def signal(self, signum: signals.Signals) -> None:
        """Send the agent a signal."""
        os.kill(self.pid, signum)

    def signal_all(self, signum: signals.Signals) -> None:
        """Send all processes below the agent a signal, then the agent, as Slurm does with ``proctrack/linuxproc``."""
        for pid in (*reversed(_below(self.pid)), self.pid):
            linux.send_signal(pid, signum)


def freeze(pid: int) -> None:
    """Send SIGSTOP, and return when no thread of the process runs any more; without effect on one that is gone.

    The signal alone stops nothing yet: the process could still answer what it is asked next.

    Raises:
        TimeoutError: it does not stop.
    """
    linux.send_signal(pid, signals.SIGSTOP)
    deadline_s = time.monotonic() + FREEZE_TIMEOUT_S
    while any(linux.thread_state(tid) not in ("T", "t", "Z", "X", "") for tid in linux.threads(pid)):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"process {pid} does not stop")
        time.sleep(0.0005)  # only its parent would be told


def thaw(pid: int) -> None:
    """Send SIGCONT; without effect on a process that is gone."""
    linux.send_signal(pid, signals.SIGCONT)


def _below(pid: int) -> list[int]:
    return [process.pid for process in linux.descendants(pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
