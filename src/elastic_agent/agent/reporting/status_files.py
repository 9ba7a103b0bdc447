"""The last status of each run on disk, for users who ask when its agent has ended, and for the agents after it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import msgspec

from elastic_agent.files import all_but_newest, write_atomically
from elastic_agent.monitoring.status import GenerationStatus, RunStatus, unexplained
from elastic_agent.protocol import Phase
from elastic_agent.transport import DiskThread
from elastic_agent.workers.output.folders import KEPT_RUNS

LONGEST_FILE = 16 * 1024 * 1024

READ_FILES = 8
"""So many files of a run are read for its history, the newest: each agent notes all generations that it has seen."""


class StatusFiles:
    """Where one agent keeps the status of its run: ``STATE_DIR/status/RUN/NODE.json``."""

    def __init__(self, state_dir: Path, run_id: str, node_id: str) -> None:
        self._folder = state_dir / "status" / run_id
        self._path = self._folder / f"{node_id}.json"
        self._disk = DiskThread("run-status")

    def save(self, status: RunStatus) -> None:
        """Write it soon; where it cannot be written, it is lost."""
        self._disk.submit("status", lambda: self._write(status)).add_done_callback(
            lambda done: done.exception()
        )

    def _write(self, status: RunStatus) -> None:
        is_new = not self._folder.is_dir()
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, msgspec.json.encode(status))
        if is_new:
            for _, old in all_but_newest(self._folder.parent.iterdir(), KEPT_RUNS):
                shutil.rmtree(old, ignore_errors=True)

    async def recorded(self) -> tuple[GenerationStatus, ...]:
        """Return the generations that agents of the run have noted in this state directory. Waits for the disk."""
        return await asyncio.wrap_future(self._disk.submit("recorded", self._read))

    def _read(self) -> tuple[GenerationStatus, ...]:
        files = [path for _, path in all_but_newest(_children(self._folder), 0)]
        rows: dict[int, GenerationStatus] = {}
        for status in islice(_statuses(files), READ_FILES):
            if status.phase == Phase.FINISHED.value:
                continue  # an earlier run of this name
            for row in status.generations:
                known = rows.get(row.generation)
                if known is None or _known_of(row) > _known_of(known):
                    rows[row.generation] = row
        return tuple(rows.values())

    async def written(self, timeout_s: float) -> None:
        """Wait until everything that was to be saved is written; not for longer than this."""
        with contextlib.suppress(OSError):
            await self._disk.call_async("written", lambda: None, timeout_s)


def saved_statuses(state_dir: Path, run_id: str | None = None) -> list[RunStatus]:
    """Return the last status of this run, or of all, that agents of this machine saved; the newest first."""
    folders = [state_dir / "status" / run_id] if run_id is not None else _children(state_dir / "status")
    found = [status for folder in folders for status in _statuses(_children(folder))]
    return sorted(found, key=lambda status: status.asked_s, reverse=True)


def _known_of(row: GenerationStatus) -> tuple[bool, bool]:
    """Rank what an agent recorded of a generation: one that was killed has not recorded its end."""
    return row.ended_s is not None, bool(row.cause)


def _statuses(paths: Iterable[Path]) -> Iterator[RunStatus]:
    """Yield the statuses in these files, without those that cannot be read."""
    for path in paths:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            if path.stat().st_size <= LONGEST_FILE:
                status = msgspec.json.decode(path.read_bytes(), type=RunStatus)
                rows = tuple(map(unexplained, status.generations))
                yield msgspec.structs.replace(status, generations=rows)


def _children(folder: Path) -> list[Path]:
    """Return what is in a folder, without files that are being written."""
    try:
        return [folder / name for name in os.listdir(folder) if not name.startswith(".")]
    except OSError:
        return []
