"""Runs Slurm's commands, and a site's own, each with a time limit: a busy controller takes long to answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence

ASK_TIMEOUT_S = 10.0


class SlurmError(Exception):
    """A command failed. ``str()`` is one line: what was seen, and what to do."""


async def scontrol(*words: str, timeout_s: float = ASK_TIMEOUT_S, **variables: str) -> str:
    """The output of ``scontrol`` with these arguments. Raises ``SlurmError``."""
    return await run_command(("scontrol", *words), timeout_s, **variables)


async def run_command(words: Sequence[str], timeout_s: float, *, shown: str = "", **variables: str) -> str:
    """The output of a command, in a session of its own: signals to the job's step are not meant for it.

    Args:
        words: the command.
        timeout_s: after so long it is killed, with everything in its session.
        shown: what an error calls the command; by default its words.
        variables: more of its environment.

    Raises:
        SlurmError: it cannot be started, fails, or takes too long.
    """
    shown = shown or " ".join(words)
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **variables},
        )
    except OSError as error:
        raise SlurmError(
            f"cannot start {words[0]} on this node: {error.strerror}; expected it on the PATH"
        ) from None
    try:
        output, stderr = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        raise SlurmError(f"{shown!r} did not complete within {timeout_s:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode != 0:
        output_line = _one_line(stderr) or _one_line(output) or "no output"
        raise SlurmError(f"{shown!r} failed with exit code {process.returncode}: {output_line}")
    return output.decode(errors="replace")


def _one_line(output: bytes) -> str:
    """The last line that is not blank, without control characters."""
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    return "".join(character for character in lines[-1] if character.isprintable())[:200] if lines else ""
