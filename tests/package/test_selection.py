"""A run of the suite takes one share of the tests that rotate; all shares together, and ``--prove``, are everything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

@pytest.mark.rotates(3)
@pytest.mark.parametrize("bug", range(7))
def test_bug(bug): pass

@pytest.mark.parametrize("store", ["c10d", pytest.param("etcd", marks=pytest.mark.rotates(3))])
def test_fault(store): pass

@pytest.mark.prove
def test_for_hours(): pass

@pytest.mark.slow
def test_slow(): pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    names = "choose_turn, pytest_addoption, pytest_collection_modifyitems, pytest_report_header"
    (tmp_path / "conftest.py").write_text(
        f"from tests.selection import {names}\n\ndef pytest_configure(config):\n    choose_turn(config)\n"
    )
    (tmp_path / "test_it.py").write_text(TESTS)
    return tmp_path


def selected(folder: Path, *options: str) -> tuple[list[str], str]:
    """Return the tests that a run of these options takes, in its order, and the line about the selection."""
    command = (sys.executable, "-m", "pytest", "--collect-only", "-o", f"pythonpath={ROOT}", "-o", "addopts=")
    done = subprocess.run(
        [*command, f"--rootdir={folder}", "--tb=short", *options], cwd=folder, capture_output=True, text=True
    )
    lines = [line.strip() for line in done.stdout.splitlines()]
    names = [line.removeprefix("<Function ").removesuffix(">") for line in lines if "<Function" in line]
    assert names, done.stdout + done.stderr
    return names, next(line for line in lines if line.startswith("selection: "))


def test_each_variant_is_run_in_one_of_so_many_turns_and_all_of_them_to_prove(folder: Path) -> None:
    everything, told = selected(folder, "--prove")
    assert told == "selection: everything"
    assert len(everything) == 11
    assert everything[0] == "test_slow", "what takes longest comes first"
    taken: list[str] = []
    for turn in (7, 8, 9):
        names, told = selected(folder, "--turn", str(turn))
        assert told.startswith(f"selection: turn {turn} ")
        assert {"test_slow", "test_fault[c10d]"} <= {*names}
        taken += [name for name in names if name not in ("test_slow", "test_fault[c10d]")]
    assert sorted(taken) == sorted({*everything} - {"test_slow", "test_fault[c10d]", "test_for_hours"})


def test_what_is_named_is_run_whatever_its_marks(folder: Path) -> None:
    names, _ = selected(folder, "-k", "bug or hours")
    assert len(names) == 8
    assert selected(folder, "test_it.py::test_for_hours")[0] == ["test_for_hours"]
