"""Whether files that torch.save wrote are whole."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

LARGE_BYTES = 1 << 30
"""Of larger files, only the directory at the end is read."""


def torn_files(paths: Iterable[Path]) -> list[str]:
    """Those that are there and cannot be read as torch.load would: cut off, empty, or with wrong check sums."""
    return [str(path) for path in paths if _is_torn(path)]


def files_below(folder: Path) -> list[Path]:
    """All files of a folder and of the folders in it."""
    return [path for path in folder.rglob("*") if path.is_file()]


def _is_torn(path: Path) -> bool:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            begin = file.read(2)
        if begin != b"PK":  # torch's format before 1.6, or not torch's: only an empty one is certainly wrong
            return size == 0
        with zipfile.ZipFile(path) as archive:
            return size <= LARGE_BYTES and archive.testzip() is not None
    except FileNotFoundError:  # replaced or removed meanwhile
        return False
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError):
        return True
