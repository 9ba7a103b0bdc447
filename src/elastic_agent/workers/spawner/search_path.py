"""Tells whether a search of `sys.path` for top-level modules still ends where it ended in the spawner."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable
from importlib.machinery import ModuleSpec, PathFinder

_Place = tuple[str, ...]
"""The file of a module, or the folders of a package without `__init__`; none of either: it is not in `sys.path`."""


class SearchPath:
    """Where `sys.path` leads when names are searched for, now, and when this was made."""

    def __init__(self, names: Collection[str], folder: str) -> None:
        """`names`: what was searched for. `folder`: comes first in the workers, unless a script changes that."""
        self._expected: dict[str, _Place] = {}
        folders = {os.path.abspath(entry) for entry in (folder, *sys.path)}
        for name in names:
            if name not in sys.modules:
                self._expected[name] = _place(PathFinder.find_spec(name))
            elif (spec := _spec_of(name)) is not None and _folder(spec) in folders:  # no other finder's
                self._expected[name] = _place(spec)
        self._state: list[tuple[str, int | None]] = []
        self._found: dict[str, _Place] = {}
        """Where searches end while `sys.path` and its folders are in that state."""
        sys.path.insert(0, folder)
        others = [name for name in self._expected if self.other((name,)) and name in sys.modules]
        self.shadowing = next(iter(self._found[others[0]]), "") if others else ""
        """What in the folder has the name of a module that is imported already."""
        sys.path.remove(folder)

    def other(self, names: Iterable[str]) -> str:
        """Return one of these names for which the search ends elsewhere now; empty if there is none."""
        self._forget_what_may_have_changed([(entry, _changed_ns(entry)) for entry in sys.path])
        for name in self._expected.keys() & names:
            if name not in self._found:
                self._found[name] = _place(PathFinder.find_spec(name))
            if self._found[name] != self._expected[name]:
                return name
        return ""

    def _forget_what_may_have_changed(self, state: list[tuple[str, int | None]]) -> None:
        """Forget where searches ended in changed folders, and those that end in one now.

        To search for all again would take milliseconds whenever a script adds a folder to `sys.path`.
        """
        changed = {entry for entry, _ in {*state} ^ {*self._state}}
        if not changed:
            return
        before, now = ([entry for entry, _ in each if entry not in changed] for each in (self._state, state))
        present = [entry for entry, _ in state if entry in changed]
        folders = {os.path.abspath(entry) for entry in changed}
        self._state = state
        self._found = {
            name: place
            for name, place in self._found.items()
            if before == now and not _is_in(folders, place) and PathFinder.find_spec(name, present) is None
        }


def _is_in(folders: set[str], place: _Place) -> bool:
    """Tell whether a module or package was found in one of these folders."""
    return any({os.path.dirname(path), os.path.dirname(os.path.dirname(path))} & folders for path in place)


def _spec_of(name: str) -> ModuleSpec | None:
    spec = getattr(sys.modules[name], "__spec__", None)
    return spec if isinstance(spec, ModuleSpec) else None


def _place(spec: ModuleSpec | None) -> _Place:
    if spec is not None and spec.has_location:
        return (spec.origin or "",)
    return tuple(spec.submodule_search_locations or ()) if spec is not None else ()


def _folder(spec: ModuleSpec) -> str:
    """Return the folder in which a module was found."""
    if spec.submodule_search_locations is not None:
        return os.path.dirname(next(iter(spec.submodule_search_locations), ""))
    return os.path.dirname(spec.origin or "")


def _changed_ns(entry: str) -> int | None:
    try:
        return os.stat(entry or ".").st_mtime_ns
    except OSError:
        return None
