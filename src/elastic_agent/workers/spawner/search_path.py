"""Tells whether a search of `sys.path` for top-level modules still ends where it ended in the spawner."""

from __future__ import annotations

import os
import sys
import zipimport
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import all_suffixes

from elastic_agent.workers.spawner.recording import stamp

PACKAGES = ("site-packages", "dist-packages")
"""How the folders end into which packages are installed."""


class SearchPath:
    """Where `sys.path` leads when names are searched for, now, and when this was made."""

    def __init__(self, searched: Mapping[str, tuple[str, bool]], path: Iterable[str]) -> None:
        """`searched`: as in :class:`Recorder`. `path`: where that was."""
        self._searched = searched
        self._suffixes = frozenset(all_suffixes())
        self._seen: dict[str, tuple[int, frozenset[str]]] = {}
        folders = {os.path.abspath(entry) for entry in path}
        self._where = {name: folder for name, (folder, _) in searched.items() if folder in folders}
        self._elsewhere = {
            name for name, (_, is_module) in searched.items() if is_module
        } - self._where.keys()
        """Found by other finders, for frozen modules, say."""
        self._startup = dict(_startup_files())

    def other(self, names: Iterable[str]) -> str:
        """Return one of these names for which the search ends elsewhere now; empty if there is none."""
        left = set(names) - self._elsewhere
        for entry in sys.path:
            folder = os.path.abspath(entry)
            for name in left & self._provides(entry):
                if self._where.get(name) != folder:
                    return name
                left.discard(name)
        return next((name for name in left if name in self._where), "")

    def changed_startup_file(self) -> str:
        """Return a file that Python runs when it starts, if one was added, changed or removed."""
        now = dict(_startup_files())
        changed = now.items() ^ self._startup.items()
        return min(changed)[0] if changed else ""

    def _provides(self, entry: str) -> frozenset[str]:
        """Return the names for which a search ends in this entry of `sys.path`, if it gets there."""
        try:
            changed_ns = os.stat(entry or ".").st_mtime_ns
        except OSError:
            return frozenset()
        seen = self._seen.get(entry)
        if seen is None or seen[0] != changed_ns:
            seen = self._seen[entry] = changed_ns, frozenset(self._listed(entry))
        return seen[1]

    def _listed(self, entry: str) -> Iterator[str]:
        try:
            files = os.listdir(entry or ".")
        except OSError:
            yield from self._archived(entry)
            return
        for file in files:
            name, dot, rest = file.partition(".")
            if name in self._searched and (
                dot + rest in self._suffixes if dot else self._is_package(entry, name)
            ):
                yield name

    def _archived(self, entry: str) -> Iterator[str]:
        try:
            archive = zipimport.zipimporter(entry)
        except zipimport.ZipImportError:
            return
        yield from (name for name in self._searched if archive.find_spec(name) is not None)

    def _is_package(self, entry: str, name: str) -> bool:
        """Whether a folder is found as a module; a mere folder is so if there is no module of the name."""
        folder = os.path.join(entry, name)
        if not self._searched[name][1]:
            return os.path.isdir(folder)
        return any(os.path.exists(os.path.join(folder, f"__init__{suffix}")) for suffix in self._suffixes)


def _startup_files() -> Iterator[tuple[str, tuple[int, int] | None]]:
    """Yield the files that the module `site` runs, each with its stamp."""
    for entry in sys.path:
        if entry.endswith(PACKAGES):
            for file in os.listdir(entry):
                if file.endswith(".pth") or file in ("sitecustomize.py", "usercustomize.py"):
                    path = os.path.join(entry, file)
                    yield path, stamp(path)
