"""Gathers the Python stacks of this node's workers when a user asks for them; the workers go on.

A worker that has made a process group answers by itself (`integrations/collectives/answers.py`). One that has not, or
that is stuck in C code, writes them to its standard error on a signal; they are read from the file that this goes to.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from functools import partial
from pathlib import Path

import elastic_agent
from elastic_agent.linux import catches, is_frozen, open_file
from elastic_agent.transport import StoreLostError, run_abandonable
from elastic_agent.workers.output.folders import file_safe

from .collectives import Collectives
from .generation import STACKS_SIGNAL
from .stalls import Progress

LOOK_S, ANSWER_LOOKS, DUMP_LOOKS, QUIET_LOOKS = 0.02, 25, 50, 5
"""The pause between looks, and the number of looks for answers of workers and then for their stacks, which are
complete when no more follows. Looks are counted: they take longer on a slow machine."""

DISK_S = 3.0
"""The time that the disk with the output of a worker has beyond the time of the looks."""

LONGEST_DUMP = 128 * 1024

_PACKAGE = f'"{os.path.dirname(elastic_agent.__file__)}/'


async def worker_stacks(
    node_id: str, progress: Progress, first_rank: int, collectives: Collectives, log_folder: str
) -> str:
    """Return the stacks of each running worker under its name, or why they cannot be had."""
    found = collectives.ask_stacks()
    asked = collectives.workers.keys() & progress.pids.keys()
    for _ in range(ANSWER_LOOKS):
        if not asked - found.keys():
            break
        await asyncio.sleep(LOOK_S)
    folder = Path(log_folder, f"{progress.generation:06d}", file_safe(node_id))

    async def stacks_of(slot: int, pid: int) -> str:
        text = readable(found.get(slot, ""))
        if not text:
            try:
                work = partial(_dump, pid, folder / str(slot) / "output.log")
                text = await run_abandonable(work, DUMP_LOOKS * LOOK_S + DISK_S)
            except StoreLostError:  # the time is over
                text = "not possible: the disk with its output does not answer"
        head = f"worker {node_id}/{slot} (rank {first_rank + slot}, pid {pid}):"
        return f"{head}\n{text}" if text.startswith(" ") else f"{head} {text}"

    return "\n\n".join(
        await asyncio.gather(*map(stacks_of, *zip(*sorted(progress.pids.items()), strict=True)))
    )


def _dump(pid: int, shown_output: Path) -> str:
    """Have a worker write its stacks, and return them; else, in one line, where they are, or why there are none."""
    if is_frozen(pid):
        return f"not possible: stopped by a signal or a debugger (state T); kill -CONT {pid} continues it"
    if not catches(pid, STACKS_SIGNAL):
        how = "started cold, or executed itself again (exec)"
        return f"not possible: {how}, and its script has not imported elastic_agent.client"
    stderr, written, quiet = Path(open_file(pid, 2)), b"", 0
    with contextlib.suppress(OSError):
        if not stderr.is_file() and shown_output.parent.is_dir():
            shown_output.touch()  # of a worker that has written nothing; the guard adds to the file that it finds
    path = next((path for path in (stderr, shown_output) if path.is_file()), Path(os.devnull))
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            os.kill(pid, STACKS_SIGNAL)
            for _ in range(DUMP_LOOKS):
                time.sleep(LOOK_S)
                more = file.read(LONGEST_DUMP)
                written = (written + more)[-LONGEST_DUMP:]
                quiet = quiet + 1 if written and not more else 0
                if quiet == QUIET_LOOKS:
                    break
    except OSError as error:
        return f"not possible: {error.strerror}"
    is_passed_on = not stderr.is_absolute() or stderr.is_relative_to("/dev/pts")
    where = "the output of its agent, of which no file has a copy" if is_passed_on else stderr
    return readable(written.decode(errors="replace")) or f"requested, see {where}"


def readable(dump: str) -> str:
    """Return what faulthandler wrote: the main thread first, its last call last, and nothing of this package."""
    text = ""
    for piece in reversed(dump.split("(most recent call first):\n")[1:]):
        calls = [f"  {line}" for line in reversed(piece.splitlines()) if line.startswith('  File "')]
        if calls := [line for line in calls if _PACKAGE not in line]:
            text += "\n".join(["  another thread" if text else "  main thread", *calls, ""])
    return text.rstrip("\n")
