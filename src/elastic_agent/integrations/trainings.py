"""Decides whether a training is certainly the one in which an earlier process of the run was when it ended.

A script that is started again begins with its first line, and only the script knows which trainings it begins then: it
may repeat those that are finished, skip them, or take the next one from a queue. So a training is continued only if
nothing else is possible, as far as its folder is concerned: no process of the run has begun a second training there, no
training has been left, by its end or by an exception that the script handled, and the signature of the one that was
interrupted is that of the one that begins. Scripts with several trainings that give each a folder of its own fulfil
this in each folder. A checkpoint contains the id of its training, because another training can overwrite its file.

The record is ``ROOT/NAME/RUN_ID/trainings.json``. It is written with the first checkpoint, before which there is
nothing to continue: a folder without checkpoints stays as the script left it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict
from urllib.parse import quote

from elastic_agent.files import write_atomically
from elastic_agent.integrations.patching import say
from elastic_agent.integrations.signature import Signature, difference

_KEPT = 16
"""The number of checkpoints that are remembered. More than one, as scripts may delete some."""

Checkpoints = dict[str, tuple[Any, int]]
"""By path, oldest first: what is noted of each to tell whether it is intact, and its step."""


class Record(TypedDict):
    """The trainings that the run has begun in a folder."""

    several: bool
    """A process has begun more than one."""
    ended: bool
    """The newest has been left."""
    id: str
    """Of the newest, also in its checkpoints."""
    world: int
    """The number of workers with which the newest has begun."""
    signature: dict[str, Signature]
    """Of the newest, by when it was known: ``begin``, and the names given to :meth:`Training.complete`."""
    checkpoints: Checkpoints
    """Those of the newest."""


_newest: dict[str, Training] = {}
"""By folder, the training that this process has begun last."""
_surroundings: dict[str, Signature] = {}
"""By folder, the signature that was given to :func:`continuable`."""
_printed: set[str] = set()
"""The kinds of lines that have been printed: one of each kind per process."""


class Training:
    """A training that this process begins. On rank 0 only; on any file system that fsspec knows."""

    def __init__(self, root: str, name: str, run_id: str, signature: Signature) -> None:
        """Begin it in the folder ``root``; records are in its folder ``name``."""
        self.folder = folder_of_run(root, name, run_id)
        self._root = root
        self._lock = threading.RLock()  # an exception may be released while it is held
        signature = {**signature, **_surroundings.get(self.folder, {})}
        previous = _newest.get(self.folder)
        _newest[self.folder] = self
        earlier = read(self.folder)
        self._is_recorded = earlier is not None
        self._record = earlier or _new_record(signature)
        self.earlier = {} if previous is not None else self._record["checkpoints"]
        """Checkpoints of earlier processes."""
        self._record["several"] |= previous is not None
        self.doubt = _doubt(self._record, signature)
        """Why these may be of another training; empty if they are certainly of this one."""
        if self.doubt or not self._record["checkpoints"]:
            self._record = {**_new_record(signature), "several": self._record["several"]}
        if self.doubt and self._is_recorded:
            self._write()

    @property
    def id(self) -> str:
        """The id that the checkpoints of this training contain."""
        return self._record["id"]

    def id_of_copies(self, named: Any, why_not: Callable[[], str]) -> str:
        """Return the id that copies of this training in memory have; empty if there are to be none.

        Args:
            named: the checkpoint from which the script begins it; None: none.
            why_not: tells why there can be no copies, which is said; empty if there can be.
        """
        if named is not None or self._record["several"]:  # it is never continued
            return ""
        reason = why_not()
        if reason:
            say(f"no copies of the training in memory: {reason}")
        return "" if reason else self.id

    def complete(self, name: str, signature: Signature) -> str:
        """Add what is known only after a checkpoint has been chosen; return how it differs from what was recorded.

        If it does, the training is over: that checkpoint is of another one.
        """
        earlier = self._record["signature"].setdefault(name, signature)
        differs = difference(earlier, signature, _world_size() / self._record["world"])
        if differs:
            self.end()
        return differs

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
            others = {
                name: entry for name, entry in self._record["checkpoints"].items() if name != checkpoint
            }
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

    def left_by(self, error: BaseException) -> None:
        """Record the training's end if the script handles the exception that has left it.

        An exception that ends the process is not released before. So the next process continues the training, also
        after a SystemExit, with which a worker leaves on a notice.
        """
        if not isinstance(error, SystemExit):
            error.__dict__["_elastic_agent_training"] = _Handled(self.end)  # also if its class is frozen

    def _write(self) -> None:
        """Replace the record in one step; without space or permission, remove it, so that none is out of date."""
        if _newest[self.folder] is not self:
            return  # the checkpoints recorded are those of a later training
        from fsspec.implementations.local import LocalFileSystem

        fs, file = filesystem_of(_file_in(self.folder))
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


class _Handled:
    """Is an attribute of an exception that has left a training, and so lives as long as the exception does."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._process = os.getpid()

    def __del__(self) -> None:
        # The interpreter itself, below all frames, releases the SystemExit that ends the process.
        ends_process = (
            sys.is_finalizing() or not threading.main_thread().is_alive() or sys._getframe().f_back is None
        )
        if not ends_process and os.getpid() == self._process:
            self._end()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()  # exceptions are pickled with their attributes


def _new_record(signature: Signature) -> Record:
    return Record(
        several=False,
        ended=False,
        id=os.urandom(8).hex(),
        world=_world_size(),
        signature={"begin": signature},
        checkpoints={},
    )


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _say_once(line: str) -> None:
    kind = line.partition(":")[0]
    if kind not in _printed:
        _printed.add(kind)
        say(line)


def _doubt(record: Record, signature: Signature | None = None) -> str:
    if record["several"]:
        return "a process of this run has begun several trainings"
    if record["ended"]:
        return "a training of this run has ended"
    if signature is None or not record["checkpoints"]:
        return ""
    differs = difference(record["signature"]["begin"], signature, _world_size() / record["world"])
    return f"{differs} in the training that was interrupted" if differs else ""


def continuable(folder: str, signature: Signature) -> bool:
    """Return whether the first training that a process begins there is certainly that of the last process.

    Args:
        folder: from :func:`folder_of_run`.
        signature: of the settings of the framework that begins the training; it becomes part of the training's.
    """
    _surroundings[folder] = signature
    record = read(folder)
    if record is None or not record["checkpoints"] or _doubt(record):
        return False
    earlier = {name: value for name, value in record["signature"]["begin"].items() if name in signature}
    return not difference(earlier, signature, _world_size() / record["world"])


def folder_of_run(root: str, name: str, run_id: str) -> str:
    """Return the folder for what the integration saves, independent of the working directory."""
    absolute = root if "://" in root else os.path.abspath(root)
    return f"{absolute.rstrip('/')}/{name}/{quote(run_id, safe='')}"


def filesystem_of(path: str) -> tuple[Any, str]:
    """Return the file system of a path or URL, and the path in it."""
    from fsspec.core import url_to_fs  # when it is used: the frameworks have imported it by then

    filesystem: tuple[Any, str] = url_to_fs(path)
    return filesystem


def read(folder: str) -> Record | None:
    """Read the record; None if there is none that can be read."""
    fs, file = filesystem_of(_file_in(folder))
    try:
        fs.invalidate_cache()  # another node may have written it
        with fs.open(file, "rb") as opened:
            found = json.loads(opened.read())
        checkpoints = {str(name): (note, int(step)) for name, (note, step) in found["checkpoints"].items()}
        return Record(
            several=bool(found["several"]),
            ended=bool(found["ended"]),
            id=str(found["id"]),
            world=int(found["world"]),
            signature={"begin": {}, **found["signature"]},
            checkpoints=checkpoints,
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        say(f"training starts as the script says: {file} cannot be read: {error!r}")
        return None


def from_rank_0(value: Any, group: Any = None) -> Any:
    """Return rank 0's value: files and clocks differ, and all ranks have to do the same."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, group=group)
    return values[0]


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _file_in(folder: str) -> str:
    return f"{folder}/trainings.json"
