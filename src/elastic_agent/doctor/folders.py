"""Checks the folders that all machines share (``--paths``): one writes, all read."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from msgspec import Struct

from elastic_agent.agent.preflight import Finding, error, warning
from elastic_agent.printable import size_text, without_surrogates

from .machine import LEAST_FREE

ENTRIES = 200


class Shared(Struct, frozen=True):
    """A folder of ``--paths`` as one machine finds it."""

    path: str
    problem: str = ""
    """Why it is of no use; empty: there is such a folder."""
    is_writable: bool = False
    identity: str = ""
    """Inode and names of the first entries: equal for a shared folder without changes."""
    free: int = 0


class SharedFolders:
    """This machine's view of the folders. All methods block: the storage may not answer."""

    def __init__(self, paths: Sequence[Path], examination: str, me: int) -> None:
        """Take the folders, the id of the examination, and this machine's rank."""
        self._paths = tuple(paths)
        self._examination = examination
        self._me = me

    def mark(self) -> tuple[Shared, ...]:
        """Look at each folder, then write a small file to it."""
        shared = tuple(map(describe, self._paths))
        for path in self._paths:
            with contextlib.suppress(OSError):
                file = os.open(
                    self._mark(path, self._me), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
                )
                with open(file, "wb", buffering=0) as opened:
                    opened.write(b"elastic-agent doctor")
                    os.fsync(file)
        return shared

    def look(self, size: int) -> tuple[tuple[int, ...], ...]:
        """Return for each folder the ranks, of so many, whose files are in it."""
        return tuple(
            tuple(rank for rank in range(size) if _is_there(self._mark(path, rank))) for path in self._paths
        )

    def remove_marks(self) -> None:
        """Remove this machine's files."""
        for path in self._paths:
            with contextlib.suppress(OSError):
                os.unlink(self._mark(path, self._me))

    def _mark(self, path: Path, rank: int) -> Path:
        return path / f".elastic-agent-doctor-{self._examination}-{rank}"


def _is_there(file: Path) -> bool:
    with contextlib.suppress(OSError):
        os.close(os.open(file, os.O_RDONLY | os.O_CLOEXEC))  # asks the server, not only the client's cache
        return True
    return False


def unanswered(paths: Iterable[Path]) -> tuple[Shared, ...]:
    """Return what is known of the paths if looking at them takes too long."""
    problem = "does not answer (a file server that is down?)"
    return tuple(Shared(_shown(path), problem) for path in paths)


def _shown(path: Path) -> str:
    return without_surrogates(str(path), "backslashreplace")


def describe(path: Path) -> Shared:
    """Return what this machine finds at the path. Blocks: the storage may not answer."""
    shown = _shown(path)
    try:
        if not path.is_dir():
            return Shared(shown, "does not exist" if not os.path.lexists(path) else "is not a directory")
        with os.scandir(path) as entries:
            names = sorted(os.fsencode(entry.name) for entry in islice(entries, ENTRIES))
        status = os.statvfs(path)
        identity = f"{path.stat().st_ino}:{hashlib.sha256(b'/'.join(names)).hexdigest()[:16]}"
    except OSError as failure:
        return Shared(shown, f"cannot be read: {failure.strerror}")
    writable = os.access(path, os.W_OK | os.X_OK) and not status.f_flag & os.ST_RDONLY
    return Shared(shown, "", writable, identity, status.f_bavail * status.f_frsize)


# -- findings -------------------------------------------------------------------------------------


def path_findings(
    names: Mapping[int, str],
    shared: Mapping[int, tuple[Shared, ...]],
    seen: Mapping[int, tuple[tuple[int, ...], ...]],
) -> Iterator[Finding]:
    """Yield what is wrong with the folders.

    Args:
        names: the machines' names, by rank.
        shared: what each machine found, by rank.
        seen: for each folder whose files a machine saw in it, by rank.
    """
    count = min(map(len, shared.values()), default=0)
    for number in range(count):
        here = {member: folders[number] for member, folders in shared.items()}
        usable = {member: folder for member, folder in here.items() if not folder.problem}
        for member, folder in here.items():
            if folder.problem:
                yield error(
                    "path",
                    f"{folder.path} {folder.problem}",
                    "mount the shared storage on this machine, at the same path as on the others"
                    if usable
                    else "check the path, or create it",
                    names[member],
                )
            elif folder.free < LEAST_FREE:
                yield warning(
                    "disk-space",
                    f"{folder.path} has only {size_text(folder.free)} free",
                    "free some space before the first checkpoint",
                    names[member],
                )
        yield from _read_only(names, usable)
        sees = {member: frozenset().union(*seen.get(member, ())[number : number + 1]) for member in usable}
        yield from _not_shared(names, usable, sees)


def _read_only(names: Mapping[int, str], usable: Mapping[int, Shared]) -> Iterator[Finding]:
    writable = [member for member, folder in usable.items() if folder.is_writable]
    remedy = (
        "check the owner of the folder, the mount options and root_squash; workers run as the user who starts the "
        "agent"
    )
    for member, folder in usable.items():
        if folder.is_writable:
            continue
        cause = f"{folder.path} is not writable"
        if writable:
            yield error(
                "path-read-only", f"{cause}, although it is on {names[writable[0]]}", remedy, names[member]
            )
        else:
            yield warning(
                "path-read-only", cause, f"nothing, if workers only read it; else {remedy}", names[member]
            )


def _not_shared(
    names: Mapping[int, str], usable: Mapping[int, Shared], sees: Mapping[int, frozenset[int]]
) -> Iterator[Finding]:
    """Yield the machines whose folder is another one than that of most machines."""
    groups: dict[object, list[int]] = {}
    for member, folder in usable.items():
        visible = sees[member] | {other for other in usable if member in sees[other]}
        # A folder that no machine can write to is recognised by its inode and content.
        key: object = frozenset(visible) if visible else folder.identity
        groups.setdefault(key, []).append(member)
    if len(groups) < 2:
        return
    largest = max(groups.values(), key=len)
    for group in groups.values():
        if group is largest:
            continue
        for member in group:
            yield error(
                "path-not-shared",
                f"{usable[member].path} is another folder here than on {names[largest[0]]}: a file written on one "
                "machine is not visible on the other",
                "mount the shared storage at this path on all machines",
                names[member],
            )
