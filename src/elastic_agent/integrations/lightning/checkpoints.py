"""Which checkpoints a run has saved, so that its next generation finds the newest, whoever saved it and where.

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
        """Paths of checkpoints that still exist, oldest first."""
        return [path for path in self._recorded() if self._exists(path)]

    def add(self, path: Any) -> None:
        """Record the newest checkpoint, when it is complete. On one rank only."""
        added = self._absolute(os.fspath(path))
        if os.path.basename(added).startswith("."):
            return  # Lightning's tuner restores the state before its trials from such a file
        paths = [*(one for one in self.available() if one != added), added][-_KEPT:]
        self._write(json.dumps({"checkpoints": paths}, indent=1).encode())

    def remove_older_on_notice(self, newest: str) -> None:
        """Delete checkpoints that were saved on earlier notices. On one rank only."""
        for path in self.available():
            if path.startswith(f"{self._absolute(self.folder)}/") and path != self._absolute(newest):
                self._fs.rm(path, recursive=True)

    def _write(self, record: bytes) -> None:
        """Replace the record when it is complete: a reader never gets half of it."""
        from fsspec.implementations.local import LocalFileSystem

        self._fs.makedirs(os.path.dirname(self._file), exist_ok=True)
        if isinstance(self._fs, LocalFileSystem):
            write_atomically(Path(self._file), record)  # fsspec's transaction copies from another file system
            return
        with self._fs.transaction, self._fs.open(self._file, "wb") as file:
            file.write(record)

    def _recorded(self) -> list[str]:
        """Without a record, or with one that is damaged: none."""
        try:
            with self._fs.open(self._file, "rb") as file:
                return [str(path) for path in json.loads(file.read())["checkpoints"]]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return []

    @staticmethod
    def _absolute(path: str) -> str:
        return path if "://" in path else os.path.abspath(path)

    @staticmethod
    def _exists(path: str) -> bool:
        from fsspec.core import url_to_fs

        fs, inside = url_to_fs(path)
        return bool(fs.exists(inside))
