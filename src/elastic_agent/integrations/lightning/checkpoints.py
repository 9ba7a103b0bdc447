"""Which checkpoints a run has saved, so that its next generation finds the newest, on any node and in any folder.

A checkpoint's name does not say which run saved it, and the default folder of Lightning's loggers is a new one at
every start. So each saved checkpoint is recorded in ``ROOT/elastic_agent/RUN_ID/fit-N/checkpoints.json``, where ROOT is
the trainer's ``default_root_dir`` and N counts the calls of ``fit`` in the script. Checkpoints that are saved on a
notice lie in the same folder.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from elastic_agent.files import write_atomically

_KEPT = 16
"""How many checkpoints are remembered. More than one, as scripts may delete some."""


class RunCheckpoints:
    """The record of one call of ``fit`` in one run. Any file system that fsspec knows."""

    def __init__(self, root: str, run_id: str, fit: int) -> None:
        from fsspec.core import url_to_fs

        self.folder = f"{root.rstrip('/')}/elastic_agent/{quote(run_id, safe='')}/fit-{fit}"
        self._fs, folder = url_to_fs(self.folder)
        self._file = f"{folder}/checkpoints.json"

    def on_notice(self, step: int) -> str:
        """Where to save on a notice."""
        return f"{self.folder}/step-{step}.ckpt"

    def available(self) -> list[str]:
        """Paths of checkpoints that still have the size with which they were recorded, oldest first."""
        return [*self._intact()]

    def damaged(self) -> list[str]:
        """A sentence for each checkpoint of another size: its worker was killed while overwriting it."""
        found = ((path, recorded, _size(path)) for path, recorded in self._recorded().items())
        return [
            f"checkpoint {path} has {size} bytes, expected {recorded} as when it was saved; it is not used"
            for path, recorded, size in found
            if size not in (None, recorded)
        ]

    def add(self, path: Any) -> None:
        """Record the newest checkpoint, when it is complete. On one rank only."""
        added = self._absolute(os.fspath(path))
        if os.path.basename(added).startswith("."):
            return  # Lightning's tuner restores the state before its trials from such a file
        size = _size(added)
        if size is None:
            return
        others = {one: recorded for one, recorded in self._intact().items() if one != added}
        self._write(dict([*others.items(), (added, size)][-_KEPT:]))

    def forget_folder(self, path: Any) -> None:
        """Remove a checkpoint that is about to be overwritten, if it is a folder. On one rank only.

        A mixture of old and new files can have the same size. A single file is kept: until it is replaced, it is good.
        """
        from fsspec.core import url_to_fs

        forgotten = self._absolute(os.fspath(path))
        recorded = self._recorded()
        if forgotten not in recorded:
            return
        fs, inside = url_to_fs(forgotten)
        if fs.isdir(inside):
            self._write({one: size for one, size in recorded.items() if one != forgotten})

    def remove_older_on_notice(self, newest: str) -> None:
        """Delete checkpoints that were saved on earlier notices. On one rank only."""
        for path in self.available():
            if path.startswith(f"{self._absolute(self.folder)}/") and path != self._absolute(newest):
                self._fs.rm(path, recursive=True)

    def _intact(self) -> dict[str, int]:
        return {path: size for path, size in self._recorded().items() if _size(path) == size}

    def _write(self, checkpoints: dict[str, int]) -> None:
        """Replace the record when it is complete: a reader never gets half of it."""
        from fsspec.implementations.local import LocalFileSystem

        record = json.dumps({"checkpoints": checkpoints}, indent=1).encode()
        self._fs.makedirs(os.path.dirname(self._file), exist_ok=True)
        if isinstance(self._fs, LocalFileSystem):
            write_atomically(Path(self._file), record)  # fsspec's transaction copies from another file system
            return
        with self._fs.transaction, self._fs.open(self._file, "wb") as file:
            file.write(record)

    def _recorded(self) -> dict[str, int]:
        """Sizes by path, oldest first. Without a record, or with one that is damaged: none."""
        try:
            with self._fs.open(self._file, "rb") as file:
                return dict(json.loads(file.read())["checkpoints"])
        except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            return {}

    @staticmethod
    def _absolute(path: str) -> str:
        return path if "://" in path else os.path.abspath(path)


def _size(path: str) -> int | None:
    """Bytes of the file, or of all files in the folder; None if it cannot be read."""
    from fsspec.core import url_to_fs

    fs, inside = url_to_fs(path)
    try:
        fs.invalidate_cache(inside)  # another worker may have written it
        info = fs.info(inside)
        return int(fs.du(inside) if info["type"] == "directory" else info["size"] or 0)
    except OSError:
        return None
