"""Runs real Python processes as a launcher would: with its environment, and nothing left of ours."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from elastic_agent.client._cells import HeartbeatFile
from tests.waiting import GUARD_S

LAUNCHER_PREFIXES = ("ELASTIC_AGENT_", "TORCHELASTIC_", "PET_", "GROUP_", "ROLE_", "LOCAL_", "MASTER_")
LAUNCHER_VARIABLES = {"RANK", "WORLD_SIZE"}

AGENT_ENVIRONMENT = {
    "RANK": "2",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "3",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "digits",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "ELASTIC_AGENT_RUN_ID": "digits",
    "ELASTIC_AGENT_NODE_ID": "rack7-a",
    "ELASTIC_AGENT_SLOT": "1",
    "ELASTIC_AGENT_INCARNATION": "5fe1c3",
    "ELASTIC_AGENT_GENERATION": "6",
    "ELASTIC_AGENT_RESTARTS": "1",
    "ELASTIC_AGENT_FIRST_GENERATION": "0",
}
"""What elastic-agent gives the second worker of node 0 of a 3+1 world, in its sixth generation."""


SLOT = int(AGENT_ENVIRONMENT["ELASTIC_AGENT_SLOT"])


def under_agent(cells: HeartbeatFile, slot: int = SLOT) -> dict[str, str]:
    """Return what elastic-agent gives a worker with this heartbeat file."""
    return {**AGENT_ENVIRONMENT, "ELASTIC_AGENT_HEARTBEAT": cells.path, "ELASTIC_AGENT_SLOT": str(slot)}


def launched(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without any launcher's variables, plus ``variables``."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(LAUNCHER_PREFIXES)
    }
    return {**kept, **variables}


def run_script(
    script: str | Path,
    variables: Mapping[str, str],
    *arguments: str | Path,
    returncode: int | None = 0,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a file or source text to its end, checking its exit status unless ``returncode`` is None."""
    what = [script] if isinstance(script, Path) else ["-c", textwrap.dedent(script)]
    done = subprocess.run(
        [sys.executable, *what, *arguments],
        cwd=cwd,
        env=launched(variables),
        capture_output=True,
        text=True,
        timeout=GUARD_S,
    )
    if returncode is not None:
        assert done.returncode == returncode, done.stderr
    return done


class Worker:
    """A running script that we talk to line by line; ``say`` prints a line and flushes it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, line: str = "") -> str:
        """Send a line and return the next one that comes back."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> str:
        """The next line of output; fails the test if the script ended instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the script ended with {self.process.wait()}"
        return line.rstrip("\n")

    def finish(self) -> tuple[int, str]:
        """Close its input, wait for its end; exit status and everything it wrote to stderr."""
        _, errors = self.process.communicate(timeout=GUARD_S)
        return self.process.returncode, errors


@contextmanager
def running(script: str, variables: Mapping[str, str]) -> Iterator[Worker]:
    """``script`` as a process that is killed, if need be, and reaped when the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(script)],
        env=launched(variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Worker(process)
    finally:
        process.kill()
        process.communicate()
