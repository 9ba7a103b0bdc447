"""The record of the checkpoints that a Lightning run has saved, read after a worker was killed at any time."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from elastic_agent.integrations.lightning.callback import common_to_all
from elastic_agent.integrations.lightning.checkpoints import RunCheckpoints


@pytest.fixture
def run(tmp_path: Path) -> RunCheckpoints:
    return RunCheckpoints(str(tmp_path / "root"), "run", 0)


def record_of(run: RunCheckpoints) -> Path:
    return Path(run.folder) / "checkpoints.json"


def saved(run: RunCheckpoints, path: Path, content: str = "content") -> str:
    path.write_text(content)
    run.add(path)
    return str(path)


def test_the_record_is_replaced_and_not_overwritten(
    run: RunCheckpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the folder for temporary files is on another file system, from which a file can only be copied."""
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    first = saved(run, tmp_path / "a.ckpt")
    with record_of(run).open() as reader:
        second = saved(run, tmp_path / "b.ckpt")
        record = reader.read()
    assert (first in record, second in record) == (True, False), (
        "this reader opened the record before it was replaced"
    )
    assert run.available() == [first, second]
    assert os.listdir(run.folder) == ["checkpoints.json"]


@pytest.mark.parametrize("damaged", ["", '{"checkpoints": [', "[]", "{}", '{"checkpoints": 3}'])
def test_a_damaged_record_is_like_none(run: RunCheckpoints, tmp_path: Path, damaged: str) -> None:
    saved(run, tmp_path / "a.ckpt")
    record_of(run).write_text(damaged)
    assert run.available() == []
    newest = saved(run, tmp_path / "b.ckpt")
    assert run.available() == [newest]


def test_a_checkpoint_that_is_half_overwritten_is_passed_over(run: RunCheckpoints, tmp_path: Path) -> None:
    older, newest = (saved(run, tmp_path / f"{name}.ckpt") for name in ("epoch-1", "last"))
    Path(newest).write_text("cont")
    assert run.available() == [older]
    assert run.damaged() == [
        f"checkpoint {newest} has 4 bytes, expected 7 as when it was saved; it is not used"
    ]
    run.add(newest)
    assert (run.available(), run.damaged()) == ([older, newest], [])


def test_a_checkpoint_that_was_deleted_is_not_called_damaged(run: RunCheckpoints, tmp_path: Path) -> None:
    Path(saved(run, tmp_path / "a.ckpt")).unlink()
    assert (run.available(), run.damaged()) == ([], [])


def test_a_folder_that_is_being_overwritten_is_not_used(run: RunCheckpoints, tmp_path: Path) -> None:
    """Old and new files have the same sizes, so the size of the folder does not tell a mixture."""
    file = saved(run, tmp_path / "file.ckpt")
    (folder := tmp_path / "folder.ckpt").mkdir()
    (folder / "shard").write_text("1234")
    run.add(folder)
    for path in (file, folder):
        run.forget_folder(path)
    assert run.available() == [file], "a file is good until it is replaced"
    run.add(folder)
    assert run.available() == [file, str(folder)]
    (folder / "shard").unlink()
    assert run.available() == [file]


def test_ranks_whose_records_differ_in_order_resume_from_the_same_checkpoint() -> None:
    assert common_to_all([["a", "b", "c"], ["c", "b", "a"], ["b", "a", "d"]]) == ["a", "b"]
