"""Runs a command of the site or of the user, with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence

CLOSE_S = 2.0
"""The time in which the pipes of a command that has ended are to close."""


class CommandError(Exception):
    """A command failed. ``str()`` is one line: what was seen, and what to do."""


async def run_command(
    words: Sequence[str],
    timeout_s: float,
    *,
    shown: str = "",
    stdin: bytes = b"",
    variables: Mapping[str, str] | None = None,
) -> str:
    """Return the output of a command, in a session of its own: signals to the agent's terminal are not meant for it.

    Args:
        words: the command.
        timeout_s: after so long it is killed, with everything in its process group. It has not ended while a process
            that it started holds its output.
        shown: what an error calls the command; by default its words.
        stdin: what it reads from standard input.
        variables: more of its environment.

    Raises:
        CommandError: it cannot be started, fails, or takes too long.
    """
    shown = shown or " ".join(words)
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **(variables or {})},
        )
    except OSError as error:
        raise CommandError(
            f"cannot start {words[0]} on this node: {error.strerror}; expected it on the PATH"
        ) from None
    try:
        output, stderr = await asyncio.wait_for(process.communicate(stdin or None), timeout_s)
    except TimeoutError:
        await _kill(process)
        raise CommandError(f"{shown!r} did not complete within {timeout_s:g} s") from None
    except asyncio.CancelledError:
        await _kill(process)
        raise
    if process.returncode != 0:
        output_line = _one_line(stderr) or _one_line(output) or "no output"
        raise CommandError(f"{shown!r} failed with exit code {process.returncode}: {output_line}")
    return output.decode(errors="replace")


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the command's process group, also if only what it started is left of it, and close its pipes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):  # a process in another session may hold the pipes for longer
        await asyncio.wait_for(process.communicate(), CLOSE_S)


def _one_line(output: bytes) -> str:
    """Return the last line that is not blank, without control characters."""
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    return "".join(character for character in lines[-1] if character.isprintable())[:200] if lines else ""
