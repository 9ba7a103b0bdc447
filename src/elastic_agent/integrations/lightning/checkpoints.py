"""The checkpoints that a run has recorded, as they are now on storage."""

from __future__ import annotations

import os
from typing import Any

from elastic_agent.integrations.trainings import Checkpoints, filesystem_of


def note_of(path: str) -> int | None:
    """Return what is noted of a checkpoint: its size, the bytes of the file, or of all files in the folder.

    None if it cannot be read.
    """
    fs, inside = filesystem_of(path)
    try:
        fs.invalidate_cache(inside)  # another worker may have written it
        info = fs.info(inside)
        return int(fs.du(inside) if info["type"] == "directory" else info["size"] or 0)
    except OSError:
        return None


def damaged(checkpoints: Checkpoints) -> list[str]:
    """Return a sentence for each checkpoint of another size: its worker was killed while overwriting it."""
    found = ((path, recorded, note_of(path)) for path, (recorded, _) in checkpoints.items())
    return [
        f"checkpoint {path} has {size} bytes, expected {recorded} as when it was saved; it is not used"
        for path, recorded, size in found
        if size not in (None, recorded)
    ]


def is_folder(path: str) -> bool:
    """Return whether a checkpoint is a folder: a mixture of old and new files can have the same size."""
    fs, inside = filesystem_of(path)
    return bool(fs.isdir(inside))


def remove_others(folder: str, newest: str) -> None:
    """Delete the checkpoints in the folder that were saved on earlier notices."""
    fs, inside = filesystem_of(folder)
    _, kept = filesystem_of(newest)
    for path in fs.glob(f"{inside}/step-*.ckpt"):
        if path != kept:
            fs.rm(path, recursive=True)


def absolute(path: Any) -> str:
    """Return the path by which other processes find the checkpoint."""
    text: str = os.fspath(path)
    return text if "://" in text else os.path.abspath(text)
