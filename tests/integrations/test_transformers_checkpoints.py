"""Which checkpoints in a folder are taken for those of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.integrations.transformers import checkpoints


def save(checkpoint: Path, callbacks: Any) -> None:
    checkpoint.mkdir()
    (checkpoint / checkpoints.STATE_FILE).write_text(json.dumps({"stateful_callbacks": callbacks}))


@pytest.mark.parametrize(
    "callbacks",
    [
        None,
        [],
        {"ElasticCallback": None},
        {"ElasticCallback": {"attributes": None}},
        {"ElasticCallback": {"attributes": {"saved": ["run"]}}},
    ],
)
def test_a_checkpoint_with_other_content_is_not_the_runs(tmp_path: Path, callbacks: Any) -> None:
    save(
        tmp_path / "checkpoint-1",
        {"ElasticCallback": {"attributes": {"saved": {"run_id": "r", "training": 0}}}},
    )
    save(tmp_path / "checkpoint-2", callbacks)
    assert checkpoints.newest_of_run(str(tmp_path), "r", 0) == str(tmp_path / "checkpoint-1")


def test_what_cannot_be_read_as_a_checkpoint_is_not_the_runs(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").write_text("a file")
    (tmp_path / "checkpoint-2" / checkpoints.STATE_FILE).mkdir(parents=True)
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / checkpoints.STATE_FILE).write_bytes(b'{"stateful_\xff')
    (tmp_path / "checkpoint-4").mkdir()
    assert checkpoints.newest_of_run(str(tmp_path), "r", 0) is None


def test_checkpoints_that_are_not_complete_are_reported_if_they_are_newer(tmp_path: Path) -> None:
    own = {"ElasticCallback": {"attributes": {"saved": {"run_id": "r", "training": 0}}}}
    (tmp_path / "checkpoint-1").mkdir()
    save(tmp_path / "checkpoint-2", own)
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-10" / checkpoints.STATE_FILE).write_text('{"epoch": 0.5, "glob')
    newest = checkpoints.newest_of_run(str(tmp_path), "r", 0)
    assert newest == str(tmp_path / "checkpoint-2")
    [sentence] = checkpoints.unreadable(str(tmp_path), newer_than=newest)
    assert f"{tmp_path / 'checkpoint-10'} has no complete trainer_state.json" in sentence
