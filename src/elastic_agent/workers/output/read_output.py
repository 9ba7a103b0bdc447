"""Reads what workers have written from its files, as they grow and later: of one node, or of all that share a folder.

May block as long as a file server hangs: not for an event loop.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

from elastic_agent.printable import without_surrogates

from .folders import file_safe

FILES = ("output.log", "stdout.log", "stderr.log")
"""Those of a worker, as far as they are there: what its agent showed, and what went to a file of its own."""

MOST_BYTES, MOST_BETWEEN = 256 * 1024, 20
"""The most that is read at a time, and the most generations, of those that came and went since the last reading."""

_GENERATION = re.compile(r"[0-9]{6,12}")
_IN_GENERATION = re.compile(r"([0-9]{6,12})/[^/]+/[0-9]+/[^/]+$")
_SET_ASIDE = re.compile(r".*~\d{1,3}")
"""The folder of a node in an earlier run of this name."""

_HOLE = re.compile(rb"\0{64,}")
"""Output that --log-limit has removed reads as zeros."""


def read_output(
    folder: Path,
    known: Mapping[str, int],
    node_id: str | None = None,
    slot: int | None = None,
    generation: int | None = None,
    *,
    last_lines: int,
    most_bytes: int = MOST_BYTES,
    follows: bool = False,
) -> tuple[dict[str, str], dict[str, int]]:
    """Return what is new by worker, and how much of each file is known now, by its path in ``folder``.

    Of the newest generation, after the rest of the one that is known and those between. If nothing is ``known``: the
    last lines of each file. At most ``most_bytes`` of each node, the newest. With ``follows``, a line without an end
    waits for the next reading. ``folder`` is that of the run; None stands for all nodes, and all workers of a node.
    """
    present = generation or newest_generation(folder)
    before = max((int(found[1]) for found in map(_IN_GENERATION.match, known) if found), default=None)
    texts: dict[str, str] = {}
    ends: dict[str, int] = {}
    numbers = {number for number in (before, present) if number is not None}
    if before is not None and present is not None:
        numbers |= {*range(max(before, present - MOST_BETWEEN), present)}
    for number in sorted(numbers):
        for node, files in _files(folder / f"{number:06d}", node_id, slot).items():
            for worker, path in files:
                file = str(path.relative_to(folder))
                start, data = _read(path, known.get(file, 0), most_bytes // len(files) // len(numbers))
                if follows and number == present:
                    data = data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1]
                ends[file] = start + len(data)
                left_out = start - known.get(file, 0)
                if not known:
                    lines = data.splitlines(keepends=True)
                    data = b"".join(lines[max(0, len(lines) - last_lines) :])
                    left_out = left_out if len(lines) < last_lines else 0
                text = _HOLE.sub(b"", data).decode(errors="replace")
                if text and left_out > 0:
                    where = without_surrogates(f"{os.uname().nodename}:{path}")
                    text = f"… {left_out / 1000:,.1f} kB left out; the whole output is in {where}\n{text}"
                if text:
                    name = f"{unquote(node)}/{worker}"
                    texts[name] = texts.get(name, "") + text + ("" if text[-1] in "\r\n" else "\n")
    return texts, ends


def newest_generation(folder: Path) -> int | None:
    """Return the generation of a run's folder that was started last; None: there is none."""
    try:
        linked = os.path.basename(os.readlink(folder / "latest"))
    except OSError:
        linked = ""
    names = [linked] if _GENERATION.fullmatch(linked) else [path.name for path in folder.glob("[0-9]*")]
    return max(map(int, filter(_GENERATION.fullmatch, names)), default=None)


def _files(folder: Path, node_id: str | None, slot: int | None) -> dict[str, list[tuple[int, Path]]]:
    """Return the workers and files of each node, as far as they are wanted, by the name of the node's folder."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for path in folder.glob("*/*/*.log"):
        node, worker = path.parts[-3:-1]
        is_worker = path.name in FILES and worker.isdecimal() and not _SET_ASIDE.fullmatch(node)
        if is_worker and (node_id is None or node == file_safe(node_id)) and slot in (None, int(worker)):
            found.setdefault(node, []).append((int(worker), path))
    return {node: sorted(files) for node, files in sorted(found.items())}


def _read(path: Path, known: int, most_bytes: int) -> tuple[int, bytes]:
    """Return where the new part of a file begins, and its content."""
    try:
        with open(path, "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            start = max(known if known <= size else 0, size - most_bytes)
            opened.seek(start)
            return start, opened.read(size - start)
    except OSError:  # removed meanwhile
        return known, b""
