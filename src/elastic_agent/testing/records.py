"""Files of JSON lines that other processes append to."""

from __future__ import annotations

import bisect
import json
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Lines:
    """Reads on from where it was."""

    def __init__(self, path: Path, kind: str = "kind", *, strict: bool = False) -> None:
        """Prepare to read; nothing is read yet.

        Args:
            path: the file, which need not exist yet.
            kind: the name of the value by which :meth:`of` finds lines.
            strict: raise ValueError for a torn line instead of skipping it.
        """
        self._path = path
        self._kind = kind
        self._strict = strict
        self._read = 0
        self._lines: list[Line] = []
        self._arrived: list[Line] = []
        self._of: dict[object, list[Line]] = {}

    def all(self) -> list[Line]:
        """Return all lines so far, in order of time (``boottime_s``)."""
        self._read_on()
        return self._lines

    def of(self, kind: str) -> list[Line]:
        """Return those of one kind, in order of time."""
        self._read_on()
        return self._of.get(kind, [])

    def arrived(self, after: int) -> list[Line]:
        """Return those after the first ``after`` lines of the file, in their order there."""
        self._read_on()
        return self._arrived[after:]

    def _read_on(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                new = file.read()
        except FileNotFoundError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for data in whole.split(b"\n")[:-1]:
            line = _decoded(data)
            if line is None and self._strict:
                raise ValueError(f"{self._path} has a line that is torn or damaged: {data!r}")
            if line is not None:
                self._arrived.append(line)
                _insert(self._lines, line)
                _insert(self._of.setdefault(str(line.get(self._kind)), []), line)


def _insert(lines: list[Line], line: Line) -> None:
    """Insert a line; lines of several processes arrive almost in order of time."""
    if lines and line["boottime_s"] < lines[-1]["boottime_s"]:
        bisect.insort(lines, line, key=lambda other: other["boottime_s"])
    else:
        lines.append(line)


def _decoded(data: bytes) -> Line | None:
    """Decode a line; None if it was torn: on a full disk, a write ends halfway, and the next line follows at once."""
    try:
        line = json.loads(data)
    except (ValueError, RecursionError):
        return None
    is_whole = isinstance(line, dict) and isinstance(line.get("boottime_s"), int | float)
    return line if is_whole else None
