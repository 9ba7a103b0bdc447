"""Files of JSON lines that other processes append to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Lines:
    """Reads on from where it was."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._lines: list[Line] = []

    def all(self) -> list[Line]:
        """Everything so far, in order of time (``boottime_s``)."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                new = file.read()
        except FileNotFoundError:
            return []
        whole = new[: new.rfind(b"\n") + 1]
        if whole:
            self._read += len(whole)
            self._lines += [line for data in whole.split(b"\n") if (line := _decoded(data)) is not None]
            self._lines.sort(key=lambda line: line["boottime_s"])  # nearly sorted: cheap
        return self._lines


def _decoded(data: bytes) -> Line | None:
    """One line; None if it was torn: on a full disk, a write ends halfway, and the next line follows at once."""
    try:
        line = json.loads(data)
    except (ValueError, RecursionError):
        return None
    is_whole = isinstance(line, dict) and isinstance(line.get("boottime_s"), int | float)
    return line if is_whole else None
