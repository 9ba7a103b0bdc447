"""The record of the trainings and checkpoints of a run, read after a worker was killed at any time."""

from __future__ import annotations

import os
import pickle
import tempfile
from pathlib import Path

import pytest

from elastic_agent.integrations import trainings
from elastic_agent.integrations.lightning.callback import damaged, note_of, remove_others
from elastic_agent.integrations.trainings import Training, continuable


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has begun no training."""
    restart(monkeypatch)


def restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainings, "_newest", {})
    monkeypatch.setattr(trainings, "_surroundings", {})
    monkeypatch.setattr(trainings, "_printed", set())


def begin(root: Path) -> Training:
    return Training(str(root), "elastic_agent", "run", {"seed": 0})


def saved(training: Training, path: Path, step: int = 0) -> str:
    path.write_text("content")
    training.add(str(path), note_of(str(path)), step)
    return str(path)


def record_of(training: Training) -> Path:
    return Path(training.folder) / "trainings.json"


def test_nothing_is_written_before_there_is_a_checkpoint(tmp_path: Path) -> None:
    """A folder that was empty is so still when the script is started again, and looks whether it is."""
    for _ in range(2):
        begin(tmp_path).end()
    assert os.listdir(tmp_path) == []


def test_the_record_is_replaced_and_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the folder for temporary files is on another file system, from which a file can only be copied."""
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    training = begin(tmp_path)
    first = saved(training, tmp_path / "a.ckpt")
    with record_of(training).open() as reader:
        second = saved(training, tmp_path / "b.ckpt", 1)
        record = reader.read()
    assert (first in record, second in record) == (True, False), (
        "this reader opened it before it was replaced"
    )
    assert os.listdir(training.folder) == ["trainings.json"]


@pytest.mark.parametrize("content", ["", '{"checkpoints": [', "[]", "{}", '{"checkpoints": 3}'])
def test_a_damaged_record_is_said_and_like_none(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(training := begin(tmp_path), tmp_path / "a.ckpt")
    record_of(training).write_text(content)
    restart(monkeypatch)
    assert begin(tmp_path).earlier == {}
    assert (
        f"training starts as the script says: {record_of(training)} cannot be read" in capsys.readouterr().err
    )


def test_of_checkpoints_at_one_step_the_first_is_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may be variants, such as averaged weights."""
    training = begin(tmp_path)
    names = [("a", 1), ("b", 2), ("b-averaged", 2), ("last", 2)]
    a, b, averaged, last = (saved(training, tmp_path / name, step) for name, step in names)
    restart(monkeypatch)
    assert [*begin(tmp_path).earlier] == [a, last, averaged, b]


def test_a_record_that_cannot_be_replaced_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would say that a training continues which is not the newest any more."""
    saved(training := begin(tmp_path), tmp_path / "a.ckpt")

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainings, "write_atomically", full)
    begin(tmp_path)
    assert not record_of(training).exists()
    assert "No space left" in capsys.readouterr().err


def test_an_earlier_training_does_not_replace_the_record_of_the_newest(tmp_path: Path) -> None:
    saved(first := begin(tmp_path), tmp_path / "a.ckpt")
    second = begin(tmp_path)
    record = record_of(second).read_text()
    saved(first, tmp_path / "b.ckpt", 1)
    first.end()
    assert record_of(second).read_text() == record


def test_a_training_is_continuable_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, object] = {"epochs": 3}
    assert not continuable(begin(tmp_path).folder, told)
    restart(monkeypatch)
    training = begin(tmp_path)
    assert not continuable(training.folder, told), "nothing of it has been saved"
    restart(monkeypatch)
    assert not continuable(training.folder, told)
    saved(training := begin(tmp_path), tmp_path / "a.ckpt")
    assert continuable(training.folder, told)
    assert not continuable(training.folder, {"epochs": 4})
    training.end()
    assert not continuable(training.folder, told)


def test_a_training_that_an_exception_has_left_is_over_once_the_exception_is_handled(tmp_path: Path) -> None:
    saved(training := begin(tmp_path), tmp_path / "a.ckpt")
    kept = []
    try:
        raise FloatingPointError
    except FloatingPointError as error:
        training.left_by(error)
        kept.append(error)
    assert type(pickle.loads(pickle.dumps(kept[0]))) is FloatingPointError
    assert continuable(training.folder, {})
    kept.clear()
    assert not continuable(training.folder, {})


def test_a_checkpoint_that_is_half_overwritten_is_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_text("content")
    recorded = {str(path): (note_of(str(path)), 0), str(tmp_path / "deleted.ckpt"): (7, 0)}
    assert damaged(recorded) == []
    path.write_text("cont")
    assert damaged(recorded) == [
        f"checkpoint {path} has 4 bytes, expected 7 as when it was saved; it is not used"
    ]


def test_only_the_latest_checkpoint_of_a_notice_is_kept(tmp_path: Path) -> None:
    for name in ("step-1.ckpt", "step-2.ckpt", "trainings.json"):
        (tmp_path / name).touch()
    (tmp_path / "step-3.ckpt").mkdir()
    remove_others(str(tmp_path), str(tmp_path / "step-2.ckpt"))
    assert sorted(os.listdir(tmp_path)) == ["step-2.ckpt", "trainings.json"]
