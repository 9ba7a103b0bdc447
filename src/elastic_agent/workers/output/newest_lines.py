"""Reads the ends of the files with the output of a node's workers."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from elastic_agent.printable import plain

from .folders import file_safe

LINES, LONGEST, FILES = 50, 16 * 1024, 64
"""So many lines, bytes of a file, and files are read."""


def newest_lines(run_folder: Path, node_id: str, generation: int) -> str:
    """Return what a node's workers wrote last, in this generation or the newest one before, under names of files.

    May block, like any disk. Raises OSError: there is no such folder.
    """
    numbers = sorted((int(name), name) for name in os.listdir(run_folder) if name.isdigit())
    folders = [run_folder / name / file_safe(node_id) for number, name in numbers if number <= generation]
    newest = next((folder for folder in reversed(folders) if folder.is_dir()), run_folder / "none")
    files = sorted(newest.glob("[0-9]*/*.log"), key=lambda file: (len(file.parent.name), file))
    found = []
    for file in files[:FILES]:
        with contextlib.suppress(OSError):
            if file.is_file() and (text := _end(file)):
                found.append(f"==> {file} <==\n{text}\n")
    return "\n".join(found)


def _end(file: Path) -> str:
    """Return the last lines; of a line that was overwritten, as by a progress bar, what it showed at the end."""
    with file.open("rb") as opened:
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - LONGEST))
        lines = opened.read(LONGEST).decode(errors="replace").removesuffix("\n").split("\n")[-LINES:]
    return plain("\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines))
