"""Knows whether a training is certainly the one in which an earlier process of the run was when it ended.

A script that is started again begins with its first line, and only the script knows which trainings it begins then: it
may repeat those that are finished, or skip them. So a training is continued only if nothing else is possible, as far as
its folder is concerned: no process of the run has begun a second training there, and none has come to the end of one.
Scripts with several trainings that give each a folder of its own fulfil this in each folder.

The record is ``ROOT/NAME/RUN_ID/trainings.json``. It is written with the first checkpoint, before which there is
nothing to continue: a folder without checkpoints stays as the script left it.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any, TypedDict
from urllib.parse import quote

from elastic_agent.files import write_atomically
from elastic_agent.integrations.say import say

_KEPT = 16
"""How many checkpoints are remembered. More than one, as scripts may delete some."""

Checkpoints = dict[str, tuple[Any, int]]
"""By path, oldest first: what is noted of each to tell whether it is intact, and its step."""


class Record(TypedDict):
    """The trainings that the run has begun in a folder."""

    several: bool
    """A process has begun more than one."""
    ended: bool
    """The newest has come to its end."""
    checkpoints: Checkpoints
    """Those of the newest."""


_newest: dict[str, Training] = {}
"""By folder, the training that this process has begun last."""
_said: set[str] = set()
"""The kinds of lines that have been said: one of each kind per process."""


class Training:
    """A training that this process begins. On rank 0 only; on any file system that fsspec knows."""

    def __init__(self, root: str, name: str, run_id: str) -> None:
        """Begin it in the folder ``root``; records are in its folder ``name``."""
        self.folder = folder_of_run(root, name, run_id)
        self._root = root
        self._lock = threading.Lock()
        previous = _newest.get(self.folder)
        _newest[self.folder] = self
        earlier = read(self.folder)
        self._is_recorded = earlier is not None
        self._record = earlier or Record(several=False, ended=False, checkpoints={})
        self.earlier = {} if previous is not None else self._record["checkpoints"]
        """Checkpoints of earlier processes."""
        self._record["several"] |= previous is not None
        self.doubt = _doubt(self._record)
        """Why these may be of another training; empty if they are certainly of this one."""
        if self.doubt:
            self._record["checkpoints"] = {}
            self._record["ended"] = False
            if self._is_recorded:
                self._write()

    def explain(self, remedy: str) -> None:
        """Say, once per process, that earlier checkpoints are not used, and which code uses them."""
        if self.doubt and self.earlier:
            _say_once(
                f"training starts as the script says, not from a checkpoint: {self.doubt} in {self._root}, so those "
                f"there may be of another training. To continue from one: {remedy}, or a folder for each training"
            )

    def add(self, checkpoint: str, note: Any, step: int) -> None:
        """Record a checkpoint that is complete.

        Of several at one step, the first counts as the newest: others may be variants, such as averaged weights.
        """
        with self._lock:
            others = {name: one for name, one in self._record["checkpoints"].items() if name != checkpoint}
            same = {name: others.pop(name) for name in [*others] if others[name][1] == step}
            self._record["checkpoints"] = dict(
                [*others.items(), (checkpoint, (note, step)), *same.items()][-_KEPT:]
            )
            self._write()

    def forget(self, checkpoint: str) -> None:
        """Remove a checkpoint that is going to be overwritten."""
        with self._lock:
            if self._record["checkpoints"].pop(checkpoint, None) is not None:
                self._write()

    def end(self) -> None:
        """Record that the training is complete: the script may now do what makes it skip this training."""
        with self._lock:
            self._record["ended"] = True
            if self._is_recorded:
                self._write()

    def _write(self) -> None:
        """Replace the record in one step; without space or permission, remove it, so that none is out of date."""
        if _newest[self.folder] is not self:
            return  # the checkpoints recorded are those of a later training
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        fs, file = url_to_fs(_file_in(self.folder))
        data = json.dumps(self._record, indent=1).encode()
        self._is_recorded = True
        try:
            fs.makedirs(os.path.dirname(file), exist_ok=True)
            if isinstance(fs, LocalFileSystem):
                write_atomically(Path(file), data)  # fsspec's transaction copies from another file system
                return
            with fs.transaction, fs.open(file, "wb") as opened:
                opened.write(data)
        except OSError as error:
            self._is_recorded = False
            _say_once(
                f"after a restart, training starts as the script says: {file} cannot be written: {error}"
            )
            if fs.exists(file):
                fs.rm(file)


def _say_once(line: str) -> None:
    kind = line.partition(":")[0]
    if kind not in _said:
        _said.add(kind)
        say(line)


def _doubt(record: Record) -> str:
    if record["several"]:
        return "a process of this run has begun several trainings"
    return "a training of this run has ended" if record["ended"] else ""


def continuable(folder: str) -> bool:
    """Return whether the first training that a process begins there is certainly that of the last process."""
    record = read(folder)
    return record is not None and bool(record["checkpoints"]) and not _doubt(record)


def folder_of_run(root: str, name: str, run_id: str) -> str:
    """Return the folder for what the integration saves, independent of the working directory."""
    absolute = root if "://" in root else os.path.abspath(root)
    return f"{absolute.rstrip('/')}/{name}/{quote(run_id, safe='')}"


def read(folder: str) -> Record | None:
    """Read the record; None if there is none that can be read."""
    from fsspec.core import url_to_fs

    fs, file = url_to_fs(_file_in(folder))
    try:
        fs.invalidate_cache()  # another node may have written it
        with fs.open(file, "rb") as opened:
            found = json.loads(opened.read())
        checkpoints = {str(name): (note, int(step)) for name, (note, step) in found["checkpoints"].items()}
        return Record(several=bool(found["several"]), ended=bool(found["ended"]), checkpoints=checkpoints)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        say(f"training starts as the script says: {file} cannot be read: {error!r}")
        return None


def _file_in(folder: str) -> str:
    return f"{folder}/trainings.json"
