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
            self._lines += [json.loads(line) for line in whole.splitlines()]
            self._lines.sort(key=lambda line: line["boottime_s"])  # nearly sorted: cheap
        return self._lines
