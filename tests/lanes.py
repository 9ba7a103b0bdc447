"""What the lanes of pytest (``-n 2``) share: work that several tests need, done by the first lane that comes to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def shared_folder(
    name: str,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    fill: Callable[[Path], None],
) -> Path:
    """Return a folder of this pytest run that ``fill`` has filled; other lanes wait until it has."""
    base = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        base = base.parent  # each lane has a folder of its own there
    folder, filled = base / name, base / f"{name}.filled"
    with FileLock(base / f"{name}.lock"):
        if not filled.exists():
            folder.mkdir(exist_ok=True)
            fill(folder)
            filled.touch()
    return folder
