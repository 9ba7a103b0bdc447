"""The modules that workers of a script imported earlier, and that the spawner therefore imports in advance.

Two files in the state directory belong to a script: the agent writes down what workers report (`reported`), and a
spawner writes down which of these modules may be preloaded, once it has tried (`verdict`). A spawner trusts a verdict
only as long as it is about the same Python, torch and module files.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_agent.files import write_atomically
from elastic_agent.workers.spawner.installed import is_installed_file, is_own
from elastic_agent.workers.spawner.trial import Reported, try_imports

VERSION = 2
LARGEST_FILE = 8 * 1024 * 1024
MOST_NAMES = 20_000

Stamp = tuple[int, int]
"""When a file was modified, in nanoseconds, and how large it is."""


class NotLearnedError(Exception):
    """The modules cannot be preloaded; the message says why."""


class SpoiledError(Exception):
    """The verdict is written, but this process has imported modules that may not be preloaded."""

    def __init__(self, left_out: Sequence[tuple[str, str, int]]) -> None:
        super().__init__()
        self.left_out = left_out


class Learned:
    """The modules that were preloaded because workers import them."""

    def __init__(
        self,
        names: Sequence[str] = (),
        files: Mapping[str, Stamp] | None = None,
        reads: Mapping[str, str] | None = None,
        serial: int = 0,
    ) -> None:
        self.names = names
        self.serial = serial
        """Of the reports that were tried. The agent increases it with each that it writes down."""
        self.files = files or {}
        """Their files, as they were when they were imported."""
        self.reads = reads or {}
        """The variables that they read, and a module that does."""

    def outdated(self) -> str:
        """A file that has changed since, because its package was upgraded, say; or an empty string."""
        return next((path for path, stamp in self.files.items() if _stamp(path) != stamp), "")


def import_learned(source: Mapping[str, Any], folder: str) -> Learned:
    """Import what workers imported.

    Args:
        source: `verdict`, the file to read or write; `reported`, the file to learn from, or an empty string to use the
            verdict as it is; `of_workers`: variables whose values differ between workers.
        folder: what `sys.path[0]` is in workers.

    Raises:
        NotLearnedError: there is no verdict, it is about something else, or no new one can be had.
        SpoiledError: another process has to import them, by the verdict.
    """
    sys.path.insert(0, folder)
    try:
        if not source["reported"]:
            return _import_by_verdict(source["verdict"])
        return _learn(source)
    finally:
        sys.path.remove(folder)


def _learn(source: Mapping[str, Any]) -> Learned:
    newest: dict[str, Any] = {}

    def reported() -> Reported:
        newest.update(_read(source["reported"]))
        positions = {name: number for number, name in enumerate(newest["names"])}
        changed = {
            variable: positions[last] + 1 if last in positions else 0
            for variable, last in newest["changed"].items()
        }
        return newest["names"], changed

    before = set(sys.modules)
    verdict = try_imports(reported, source["of_workers"])
    files = {path: stamp for path, stamp in _files(before).items() if is_installed_file(path)}
    learned = Learned(verdict.accepted, files, verdict.reads, newest["serial"])
    content = {
        **_about(),
        "serial": learned.serial,
        "names": verdict.accepted,
        "reads": verdict.reads,
        "files": learned.files,
    }
    _write(source["verdict"], json.dumps(content).encode())
    if len(verdict.accepted) < len(newest["names"]) or verdict.left_out:
        raise SpoiledError(verdict.left_out)
    return learned


def _import_by_verdict(path: str) -> Learned:
    verdict = _read(path)
    if any(verdict.get(key) != value for key, value in _about().items()):
        raise NotLearnedError("the modules were tried with another Python, torch or search path")
    for file, stamp in verdict["files"].items():
        if _stamp(file) != tuple(stamp):
            raise NotLearnedError(f"{file} has changed since the modules were tried")
    before = set(sys.modules)
    for name in verdict["names"]:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise NotLearnedError(f"{name} cannot be imported: {error}") from None
    files = _files(before)
    strange = next((file for file in files if not is_installed_file(file)), None)
    if strange is not None:
        raise NotLearnedError(f"{strange} is imported by an installed module")
    return Learned(verdict["names"], files, verdict["reads"], verdict["serial"])


def _files(before: set[str]) -> dict[str, Stamp]:
    """The files of the modules that have been imported since."""
    files: dict[str, Stamp] = {}
    for name in [one for one in sys.modules if one not in before and not is_own(one)]:
        path = getattr(getattr(sys.modules[name], "__spec__", None), "origin", None)
        if isinstance(path, str) and os.path.isabs(path) and (stamp := _stamp(path)) is not None:
            files[path] = stamp
    return files


def forget(source: Mapping[str, Any]) -> None:
    """Remove the verdict: it was wrong."""
    with contextlib.suppress(OSError):
        os.unlink(source["verdict"])


def _about() -> dict[str, Any]:
    """What a verdict depends on, besides the files of the modules."""
    return {
        "version": VERSION,
        "python": sys.version,
        "torch": str(sys.modules["torch"].__version__),
        "path": sys.path,
    }


def _stamp(path: str) -> Stamp | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _read(path: str) -> dict[str, Any]:
    """A file of one of the two kinds. Raises NotLearnedError: it is missing or damaged."""
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read(LARGEST_FILE))
        names = content["names"]
        maps = [content[key] for key in ("reads", "files", "changed") if key in content]
        sound = (
            content["version"] == VERSION
            and isinstance(names, list)
            and len(names) <= MOST_NAMES
            and all(isinstance(one, str) for one in names)
            and all(isinstance(one, dict) for one in maps)
            and isinstance(content["serial"], int)
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise NotLearnedError(f"{path} cannot be read: {error}") from None
    if not sound:
        raise NotLearnedError(f"{path} is damaged")
    found: dict[str, Any] = content
    return found


def _write(path: str, data: bytes) -> None:
    """Replace the file in one step. A state directory that cannot be written is reported by the agent itself."""
    with contextlib.suppress(OSError):
        write_atomically(Path(path), data)
