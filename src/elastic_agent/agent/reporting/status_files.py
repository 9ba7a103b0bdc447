"""The last status of each run on disk, for users who ask when its agent has ended."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import msgspec

from elastic_agent.files import all_but_newest, write_atomically
from elastic_agent.monitoring.status import RunStatus
from elastic_agent.rendezvous.disk_thread import DiskThread

KEPT_RUNS = 200
LONGEST_FILE = 16 * 1024 * 1024


class StatusFiles:
    """Where one agent keeps the status of its run: ``STATE_DIR/status/RUN/NODE.json``."""

    def __init__(self, state_dir: Path, run_id: str, node_id: str) -> None:
        self._folder = state_dir / "status" / run_id
        self._path = self._folder / f"{node_id}.json"
        self._disk = DiskThread("run-status")

    def save(self, status: RunStatus) -> None:
        """Write it soon; where it cannot be written, it is lost."""
        data = msgspec.json.encode(status)
        self._disk.submit("status", lambda: self._write(data)).add_done_callback(
            lambda done: done.exception()
        )

    def _write(self, data: bytes) -> None:
        is_new = not self._folder.is_dir()
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, data)
        if is_new:
            for _, old in all_but_newest(self._folder.parent.iterdir(), KEPT_RUNS):
                shutil.rmtree(old, ignore_errors=True)

    async def written(self, timeout_s: float) -> None:
        """Wait until everything that was to be saved is written; not for longer than this."""
        with contextlib.suppress(OSError):
            await self._disk.call_async("written", lambda: None, timeout_s)


def saved_statuses(state_dir: Path, run_id: str | None = None) -> list[RunStatus]:
    """The last status of this run, or of all, that agents of this machine saved; the newest first."""
    found: list[RunStatus] = []
    folders = [state_dir / "status" / run_id] if run_id is not None else _children(state_dir / "status")
    for folder in folders:
        for path in _children(folder):
            with contextlib.suppress(OSError, ValueError, RecursionError):
                if path.suffix == ".json" and path.stat().st_size <= LONGEST_FILE:
                    found.append(msgspec.json.decode(path.read_bytes(), type=RunStatus))
    return sorted(found, key=lambda one: one.asked_s, reverse=True)


def _children(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in os.listdir(folder) if not name.startswith(".")]
    except OSError:
        return []
