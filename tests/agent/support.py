"""Starts agents as users do, with leases and patience that outlast a stall of the machine."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import textwrap
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tests.cli import support
from tests.cli.support import COMMAND

__all__ = [
    "COMMAND",
    "asynchronous",
    "clean_environment",
    "elastic_agent",
    "options_for",
    "run",
    "started",
    "training",
]

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


def options_for(folder: Path, source: str, *options: str) -> list[str]:
    """Write a script; return the words that run it with its state in the same folder, and a readable log."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(source))
    return ["--state-dir", str(folder / "state"), "--log-format", "console", *options, str(script)]


def run(
    folder: Path, source: str, *options: str, arguments: Sequence[str] = (), **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run a script with these arguments to its end."""
    return elastic_agent(*options_for(folder, source, *options), *arguments, **how)


class Started:
    """A running ``elastic-agent``; what its workers print and what it logs come in pipes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def tell(self, text: str) -> None:
        """Send its worker a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

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


@contextmanager
def training(
    folder: Path, *options: str, source: str = "print('up', flush=True); input()", **how: Any
) -> Iterator[Started]:
    """Start an agent; yield it when its worker has printed "up". Without a script, the worker then waits for a line."""
    with started(*options_for(folder, source, *options), **how) as agent:
        assert agent.line() == "up"
        yield agent


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run
