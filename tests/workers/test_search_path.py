"""Checks whether a search for modules still ends where it ended in the spawner, while scripts change `sys.path`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_agent.workers.spawner.search_path import SearchPath

NAMES = ("json", "nowhere")
"""A module that is imported, and a name for which there is none."""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the script, first in `sys.path`; beside it is another one with modules of these names."""
    folder, others = tmp_path / "script", tmp_path / "others"
    folder.mkdir()
    others.mkdir()
    for name in NAMES:
        (others / f"{name}.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path])
    return folder


def write(path: Path) -> None:
    """Add a file, as if some time after the folder was looked at."""
    path.touch()
    later_ns = path.parent.stat().st_mtime_ns + 10**9
    os.utime(path.parent, ns=(later_ns, later_ns))
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("change", "elsewhere"),
    [
        (lambda script: None, []),
        (lambda script: sys.path.insert(0, str(script.parent)), []),
        (lambda script: sys.path.insert(0, str(script.parent / "others")), ["json", "nowhere"]),
        (lambda script: sys.path.append(str(script.parent / "others")), ["nowhere"]),
        (lambda script: write(script / "json.py"), ["json"]),
        (lambda script: write(script / "helper.py"), []),
        (lambda script: sys.path.__setitem__(slice(None), [str(script)]), ["json"]),
        (lambda script: sys.path.reverse(), []),
    ],
    ids=[
        "nothing",
        "a folder with none of them",
        "a folder that comes first",
        "a folder that comes last",
        "a file beside the script",
        "another file beside the script",
        "all folders but the script's are gone",
        "another order",
    ],
)
def test_names_that_are_found_elsewhere_are_noticed(
    script: Path, change: Callable[[Path], object], elsewhere: list[str]
) -> None:
    search = SearchPath(NAMES, str(script))
    sys.path.insert(0, str(script))
    change(script)
    assert [name for name in NAMES if search.other((name,))] == elsewhere


def test_a_file_that_has_the_name_of_an_imported_module_is_named(script: Path) -> None:
    (script / "json.py").touch()
    (script / "nowhere.py").touch()
    assert SearchPath(NAMES, str(script)).shadowing == str(script / "json.py")
