"""Tells whether a search of `sys.path` for top-level modules still ends where it ended in the spawner."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable
from importlib.machinery import ModuleSpec, PathFinder

_Place = tuple[str, ...]
"""The file of a module, or the folders of a package without `__init__`; none of either: it is not in `sys.path`."""


class SearchPath:
    """The places to which `sys.path` leads when names are searched for, now, and when this was made."""

    def __init__(self, names: Collection[str], folder: str) -> None:
        """Remember where searches for `names` end. `folder`: comes first in the workers, unless a script
        changes that."""
        self._expected: dict[str, _Place] = {}
        folders = {os.path.abspath(entry) for entry in (folder, *sys.path)}
        for name in names:
            if name not in sys.modules:
                self._expected[name] = _place(PathFinder.find_spec(name))
            elif (spec := _spec_of(name)) is not None and _folder(spec) in folders:  # no other finder's
                self._expected[name] = _place(spec)
        self._state: list[tuple[str, int | None]] = []
        self._found: dict[str, _Place] = {}
        """The places where searches end while `sys.path` and its folders are in that state."""
        sys.path.insert(0, folder)
        others = [name for name in self._expected if self.other((name,)) and name in sys.modules]
        self.shadowing = next(iter(self._found[others[0]]), "") if others else ""
        """The file in the folder that has the name of a module that is imported already."""
        sys.path.remove(folder)

    def other(self, names: Iterable[str]) -> str:
        """Return one of these names for which the search ends elsewhere now; empty if there is none."""
        state = [(entry, _changed_ns(entry)) for entry in sys.path]
        if state != self._state:
            self._state, self._found = state, {}
        for name in self._expected.keys() & names:
            if name not in self._found:
                self._found[name] = _place(PathFinder.find_spec(name))
            if self._found[name] != self._expected[name]:
                return name
        return ""


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
