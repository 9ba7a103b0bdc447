"""Which of the checkpoints in a ``Trainer``'s folder this run saved."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

STATE_FILE = "trainer_state.json"
"""The last file of a checkpoint to be written: without it, or with half of it, the checkpoint is not complete."""


def newest_of_run(output_dir: str, run_id: str, training: int) -> str | None:
    """The newest complete checkpoint in the folder that this run has saved in its n-th training, or None."""
    for folder in _newest_first(Path(output_dir)):
        state = saved(folder)
        if (state.get("run_id"), state.get("training")) == (run_id, training):
            return str(folder)
    return None


def unreadable(output_dir: str, newer_than: str | None) -> list[str]:
    """A sentence for each checkpoint in the folder that cannot be used although it is newer than the given one."""
    sentences = []
    for folder in _newest_first(Path(output_dir)):
        if str(folder) == newer_than:
            break
        if not trainer_state(folder):
            sentences.append(
                f"checkpoint {folder} has no complete {STATE_FILE}, which is written last; it is not used"
            )
    return sentences


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


def _newest_first(output_dir: Path) -> list[Path]:
    found = {
        int(number[1]): folder
        for folder in output_dir.glob("checkpoint-*")
        if (number := re.fullmatch(r"checkpoint-(\d+)", folder.name))
    }
    return [found[number] for number in sorted(found, reverse=True)]
