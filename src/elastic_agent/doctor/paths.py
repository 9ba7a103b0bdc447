"""Checks of the folders that all machines share (``--paths``): one writes, all read."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from elastic_agent.printable import without_surrogates

from .findings import Finding, error, warning
from .records import SeenPaths, Shared
from .system import LEAST_FREE, size

ENTRIES = 200


class SharedFolders:
    """This machine's view of the folders. All methods block: the storage may not answer."""

    def __init__(self, paths: Sequence[Path], me: str) -> None:
        """``me``: the id of this machine."""
        self._paths = tuple(paths)
        self._me = me
        self._marks: dict[Path, int] = {}
        """The files that this machine has written, with their descriptors, on which it holds a lock."""

    def describe(self) -> tuple[Shared, ...]:
        """Look at each folder, without writing."""
        return tuple(_describe(path) for path in self._paths)

    def mark(self) -> None:
        """Write a small file to each folder, and lock it."""
        for path in self._paths:
            with contextlib.suppress(OSError):
                fd = os.open(
                    _mark(path, self._me), os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600
                )
                self._marks[path] = fd
                os.write(fd, self._me.encode())
                os.fsync(fd)
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def look(self, members: Sequence[str]) -> SeenPaths:
        """Which machines' files are here, and whether a lock of another machine holds here."""
        seen = tuple(tuple(one for one in members if self._sees(path, one)) for path in self._paths)
        ignored = tuple(
            any(_is_lockable(_mark(path, one)) for one in here if one != self._me)
            for path, here in zip(self._paths, seen, strict=True)
        )
        return SeenPaths(seen, ignored)

    def _sees(self, path: Path, member: str) -> bool:
        # Not opened: closing a file ends all locks that this process has on it.
        return path in self._marks if member == self._me else _is_there(_mark(path, member))

    def remove_marks(self) -> None:
        """Remove this machine's files."""
        for path, fd in self._marks.items():
            with contextlib.suppress(OSError):
                os.unlink(_mark(path, self._me))
            os.close(fd)
        self._marks.clear()


def _mark(path: Path, member: str) -> Path:
    return path / f".elastic-agent-doctor-{member}"


def _is_there(file: Path) -> bool:
    with contextlib.suppress(OSError):
        os.close(os.open(file, os.O_RDONLY | os.O_CLOEXEC))  # asks the server, not only the client's cache
        return True
    return False


def _is_lockable(file: Path) -> bool:
    """Whether this process could take a lock that another machine holds."""
    try:
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _describe(path: Path) -> Shared:
    shown = without_surrogates(str(path), "backslashreplace")
    try:
        if not path.is_dir():
            return Shared(shown, "does not exist" if not os.path.lexists(path) else "is not a directory")
        with os.scandir(path) as entries:
            names = sorted(os.fsencode(one.name) for one in islice(entries, ENTRIES))
        status = os.statvfs(path)
        identity = f"{path.stat().st_ino}:{hashlib.sha256(b'/'.join(names)).hexdigest()[:16]}"
    except OSError as failure:
        return Shared(shown, f"cannot be read: {failure.strerror}")
    writable = os.access(path, os.W_OK | os.X_OK) and not status.f_flag & os.ST_RDONLY
    return Shared(shown, "", writable, identity, status.f_bavail * status.f_frsize)


# -- findings -------------------------------------------------------------------------------------


def path_findings(
    names: dict[str, str], shared: dict[str, tuple[Shared, ...]], seen: dict[str, SeenPaths]
) -> Iterator[Finding]:
    """What is wrong with the folders.

    Args:
        names: the machines' names, by id.
        shared: what each machine found, by id.
        seen: what each machine saw of the others' files, by id.
    """
    count = min((len(one) for one in shared.values()), default=0)
    for number in range(count):
        here = {one: folders[number] for one, folders in shared.items()}
        usable = {one: folder for one, folder in here.items() if not folder.problem}
        for one, folder in here.items():
            if folder.problem:
                yield error(
                    "path",
                    f"{folder.path} {folder.problem}",
                    "mount the shared storage on this machine, at the same path as on the others"
                    if usable
                    else "check the path, or create it",
                    names[one],
                )
            elif folder.free < LEAST_FREE:
                yield warning(
                    "disk-space",
                    f"{folder.path} has only {size(folder.free)} free",
                    "free some space before the first checkpoint",
                    names[one],
                )
        yield from _read_only(names, usable)
        yield from _not_shared(names, usable, {one: _nth(seen.get(one), number) for one in usable})
        if any(one.lock_ignored[number] for one in seen.values() if number < len(one.lock_ignored)):
            yield warning(
                "locks",
                f"{next(iter(here.values())).path}: file locks of one machine do not hold on the others",
                "do not rely on file locks there (data sets that lock their cache), or mount it with locks (NFS: "
                "without nolock, Lustre: with flock)",
            )


def _nth(seen: SeenPaths | None, number: int) -> frozenset[str]:
    return frozenset(seen.seen[number]) if seen is not None and number < len(seen.seen) else frozenset()


def _read_only(names: dict[str, str], usable: dict[str, Shared]) -> Iterator[Finding]:
    writable = [one for one, folder in usable.items() if folder.is_writable]
    for one, folder in usable.items():
        if writable and not folder.is_writable:
            yield error(
                "path-read-only",
                f"{folder.path} is not writable, although it is on {names[writable[0]]}",
                "check the owner of the folder, the mount options and root_squash; workers run as the user who "
                "starts the agent",
                names[one],
            )


def _not_shared(
    names: dict[str, str], usable: dict[str, Shared], sees: dict[str, frozenset[str]]
) -> Iterator[Finding]:
    """Machines whose folder is another one than that of most machines."""
    groups: dict[object, list[str]] = {}
    for one, folder in usable.items():
        visible = sees[one] | {other for other in usable if one in sees[other]}
        # A folder that no machine can write to is recognised by its inode and content.
        key: object = frozenset(visible) if visible else folder.identity
        groups.setdefault(key, []).append(one)
    if len(groups) < 2:
        return
    largest = max(groups.values(), key=len)
    for group in groups.values():
        if group is largest:
            continue
        for one in group:
            yield error(
                "path-not-shared",
                f"{usable[one].path} is another folder here than on {names[largest[0]]}: a file written on one "
                "machine is not visible on the other",
                "mount the shared storage at this path on all machines",
                names[one],
            )
