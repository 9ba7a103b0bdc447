"""Checks of what users care about: torn checkpoints, steps lost after notices, and what is left behind."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from elastic_agent.testing.cluster import LocalCluster
from elastic_agent.testing.mistakes import Evidence, steps_lost_after_notices

LARGE_BYTES = 1 << 30
"""Of larger files, only the directory at the end is read."""
_HEED_NOTICES = (
    "check for notices after each step (client.Agreement().notice()), then save and call client.leave(); see "
    "docs/script.md, Notices"
)


@dataclass(frozen=True)
class Check:
    """One check, and what was found."""

    passed: bool
    text: str

    def __str__(self) -> str:
        return f"{'ok' if self.passed else 'FAILED'}: {self.text}"


def check_notices(seen: Evidence, *, is_explained: bool) -> Check:
    """Check that no steps were lost after notices; ``is_explained``: a mistake was named that may be why."""
    after = steps_lost_after_notices(seen)
    lost = [f"{steps} after generation {generation}" for generation, steps in after.items() if steps]
    text = f"steps lost after {len(after)} notices: {', '.join(lost) or 'none'}"
    return Check(not lost, f"{text}; {_HEED_NOTICES}" if lost and not is_explained else text)


def check_leftovers(cluster: LocalCluster) -> Check:
    """Check that no processes, heartbeat files or shared memory of workers were left behind."""
    found = [f"process {pid}" for pid in cluster.wait_gone(cluster.marked_processes())]
    born = cluster.records("born")
    beats = {str(line["heartbeat_file"]) for line in born if line["heartbeat_file"]}
    found += [path for path in sorted(beats) if os.path.exists(path)]
    prefixes = tuple(f"torch_{line['pid']}_" for line in born)
    found += [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name.startswith(prefixes)]
    return Check(not found, f"left behind: {', '.join(found) or 'nothing'}")


def torn_files(paths: Iterable[Path]) -> list[str]:
    """Return those that exist and cannot be read as torch.load would: cut off, empty, or with wrong check sums."""
    return [str(path) for path in paths if _is_torn(path)]


def files_below(folder: Path) -> list[Path]:
    """Return all files of a folder and of the folders in it."""
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
