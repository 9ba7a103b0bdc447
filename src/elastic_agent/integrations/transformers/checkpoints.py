"""The content of a checkpoint of the ``Trainer``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

STATE_FILE = "trainer_state.json"
"""The last file of a checkpoint to be written: without it, or with half of it, the checkpoint is not complete."""


def saved(checkpoint: str | Path) -> dict[str, Any]:
    """What ``ElasticCallback`` saved in the checkpoint; empty if it was saved without."""
    state: Any = trainer_state(checkpoint)
    for name in ("stateful_callbacks", "ElasticCallback", "attributes", "saved"):
        state = state.get(name) if isinstance(state, dict) else None
    return state if isinstance(state, dict) else {}


def trainer_state(checkpoint: str | Path) -> dict[str, Any]:
    """The content of the checkpoint's ``trainer_state.json``; empty if it has none that is complete and readable."""
    try:
        state = json.loads((Path(checkpoint) / STATE_FILE).read_text())
    except (
        OSError,
        ValueError,
        RecursionError,
    ):  # on rank 0 alone, an error would leave the other ranks waiting for its choice
        return {}
    return state if isinstance(state, dict) else {}
