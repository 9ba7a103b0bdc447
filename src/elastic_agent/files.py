"""Files that several agents share: written in one step, locked, and removed when there are too many."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_SPACE = "free space there, or pass another folder (--state-dir, --log-dir)"
_ANOTHER = "pass a folder that can be written (--state-dir, --log-dir)"
_REMEDIES = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EROFS: _ANOTHER,
    errno.EACCES: _ANOTHER,
    errno.EMFILE: "raise ulimit -n before the agent is started",
    errno.EAGAIN: "raise the limit of processes: ulimit -u, or pids.max of the cgroup",
}


def with_remedy(error: Exception) -> str:
    """Return an error of the agent itself in words, and what to do about it if that is known; reads no file."""
    remedy = _REMEDIES.get(error.errno or 0) if isinstance(error, OSError) else None
    return f"{error} (remedy: {remedy})" if remedy else str(error)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file's content in one step; a reader sees the old or the new, never a mixture.

    Raises:
        OSError: it cannot be written; names the path.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError):
            error.filename = error.filename or str(path)
        raise


def is_at(handle: int, path: Path) -> bool:
    """Return whether the open file is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Open the file and lock it (``flock``). Raises OSError: there is none, or another process has locked it."""
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield handle
    finally:
        os.close(handle)


def modified_s(path: Path) -> float:
    """Return when the file was last modified, in seconds of Unix time. Raises OSError."""
    return path.lstat().st_mtime


def all_but_newest(
    paths: Iterable[Path], keep: int, age: Callable[[Path], float] = modified_s
) -> list[tuple[float, Path]]:
    """Return the paths beyond the newest ``keep``, each with its time, the newest first; what has vanished is
    left out."""
    dated: list[tuple[float, Path]] = []
    for path in paths:
        with contextlib.suppress(OSError):
            dated.append((age(path), path))
    return sorted(dated, reverse=True)[keep:]
