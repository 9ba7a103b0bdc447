"""Starts agents as users do, with leases and patience that outlast a stall of the machine."""

from __future__ import annotations

import asyncio
import functools
import subprocess
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

from tests.cli import support
from tests.cli.support import COMMAND

__all__ = ["COMMAND", "asynchronous", "clean_environment", "elastic_agent", "started"]

PATIENT = {
    "ELASTIC_AGENT_LEASE_TTL": "60",
    "ELASTIC_AGENT_START_TIMEOUT": "300",
    "ELASTIC_AGENT_WORKER_START": "cold",
}
"""Cold workers start sooner where scripts import little, and no spawner imports torch."""
PATIENCE_S = 300.0


def clean_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without settings, except for these."""
    return support.clean_environment({**PATIENT, **(more or {})})


def elastic_agent(
    *argv: str, variables: Mapping[str, str] | None = None, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``elastic-agent`` to its end; ``how``: as in tests/cli/support.py."""
    return support.elastic_agent(
        *argv, variables={**PATIENT, **(variables or {})}, patience_s=PATIENCE_S, **how
    )


class Started:
    """A running ``elastic-agent``; what its workers print and what it logs come in pipes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def line(self) -> str:
        """Return the next line that a worker prints, without its end."""
        return _readable(self.process.stdout).readline().rstrip("\n")

    def log_until(self, words: str) -> str:
        """Return the log up to the next line that contains the words."""
        lines = []
        for line in _readable(self.process.stderr):
            lines.append(line)
            if words in line:
                break
        else:
            raise AssertionError(f"not logged: {words}; but:\n{''.join(lines)}")
        return "".join(lines)

    def end(self, told: str | None = None) -> tuple[int, str]:
        """Tell its workers something, and wait for its end; return its exit code and the rest of the log."""
        _, log = self.process.communicate(told, PATIENCE_S)
        return self.process.returncode, log


def _readable(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


@contextmanager
def started(
    *argv: str,
    variables: Mapping[str, str] | None = None,
    command: Sequence[str] = COMMAND,
    **popen: Any,
) -> Iterator[Started]:
    """Start ``elastic-agent``, and kill it in the end if it still runs."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(
        [*command, *argv], env=clean_environment(variables), text=True, **{**pipes, **popen}
    ) as process:
        try:
            yield Started(process)
        finally:
            process.kill()


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run
