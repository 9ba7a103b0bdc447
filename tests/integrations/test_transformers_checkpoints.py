"""What is read of a checkpoint of the Trainer that may be damaged, or another launcher's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.integrations.transformers import checkpoints


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
def test_a_checkpoint_with_other_content_has_no_position(tmp_path: Path, callbacks: Any) -> None:
    (tmp_path / checkpoints.STATE_FILE).write_text(json.dumps({"stateful_callbacks": callbacks}))
    assert checkpoints.saved(tmp_path) == {}


@pytest.mark.parametrize("content", [b'{"stateful_\xff', b"", b"[]", b'{"global_step": 7, ', None])
def test_a_checkpoint_that_is_not_complete_has_no_state(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / checkpoints.STATE_FILE).write_bytes(content)
    assert checkpoints.trainer_state(tmp_path) == {}
