"""Keeps the files that workers write their output to below a size.

Workers and their children append to these files themselves, with descriptors that they inherited, so nothing
can intercept the output: a thread checks the sizes from time to time. How a file is made smaller depends on
whether it is read during the run:

* Usually its content is moved away and the file is truncated (what logrotate calls copytruncate): the first time
  to `stdout.log.first`, which stays, later to `stdout.log.previous`, which the next one replaces. So the
  beginning and the end are kept. Where the file system can remove blocks from the beginning of a file (ext4, XFS),
  nothing is lost. Elsewhere the file is truncated, and what workers write between the last read and that is
  lost: the output of some microseconds, or of milliseconds on a busy machine, after every third of the limit.
* A file that is followed (`tee`, filters) must keep its length: the reader stays at its offset, and in a
  truncated file it would wait until the file has that length again. There the middle is removed and leaves a
  hole, which takes no space and reads as zeros. Few network file systems support that; elsewhere such a file
  grows.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO

PARTS = 3
"""The beginning, what came before the newest part, and the newest part: each has as much of the limit."""

CHECK_EVERY_S = 5.0
"""A file may exceed its limit by what a worker writes in this time, as long as it runs."""

CLOSE_S = 5.0
"""How long the last check may take."""

_CHUNK_BYTES = 8 * 1024 * 1024
_STAT_BLOCK_BYTES = 512
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_FALLOC_FL_COLLAPSE_RANGE = 8
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_CUT_HERE = b"\n[elastic-agent: output was removed here, see --log-limit]\n"
_CUT_BEFORE = b"[elastic-agent: output between the .first file and this was removed, see --log-limit]\n"

logger = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class OutputFiles:
    """The files of a generation: those that only the workers use, and those that are followed."""

    plain: frozenset[str] = frozenset()
    followed: frozenset[str] = frozenset()


class LogLimit:
    """Limits the files of the running generation, and at its end once more, in a thread of its own.

    A thread, because a file system may hang and the agent's loop must not.

    Args:
        limit_bytes: What a file may take, the parts of it that were moved away included.
        look_every_s: Pause between two checks.
    """

    def __init__(self, limit_bytes: int, check_every_s: float = CHECK_EVERY_S) -> None:
        self._limit_bytes = limit_bytes
        self._check_every_s = check_every_s
        self._files = OutputFiles()
        self._written: queue.SimpleQueue[OutputFiles | None] = queue.SimpleQueue()
        """Files that no worker writes to any more; None: there will be no others."""
        self._thread: threading.Thread | None = None
        self._warned: set[str] = set()

    def watch(self, files: OutputFiles) -> None:
        """Limit these files from now on; earlier ones are not written any more."""
        self._written.put(self._files)
        self._files = files
        if self._thread is None and (files.plain or files.followed):
            self._thread = threading.Thread(target=self._run, name="log-limit", daemon=True)
            self._thread.start()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """No worker writes any more. Waits for the last check, within its time limit."""
        self._written.put(self._files)
        self._written.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def check(self) -> None:
        """Make smaller what is too large."""
        self._look_at(self._files, begin_anew)

    def _look_at(self, files: OutputFiles, cut: Callable[[str, int], None]) -> None:
        for path in files.plain:
            self._apply(cut, path)
        for path in files.followed:
            self._apply(take_out_middle, path)

    def _run(self) -> None:
        while True:
            try:
                written = self._written.get(timeout=self._check_every_s)
            except queue.Empty:
                self.check()
                continue
            if written is None:
                return
            self._look_at(written, cut_middle)

    def _apply(self, cut: Callable[[str, int], None], path: str) -> None:
        try:
            cut(path, self._limit_bytes)
        except FileNotFoundError:
            pass  # not there yet, or removed by the user
        except OSError as error:
            if path not in self._warned:
                self._warned.add(path)
                logger.warning("cannot keep %s below --log-limit: %s", path, error.strerror)


def begin_anew(path: str, limit_bytes: int) -> None:
    """Move the content away, once it is more than a third of the limit. Raises OSError."""
    part_bytes = limit_bytes // PARTS
    if os.stat(path).st_size <= part_bytes:
        return
    with open(path, "r+b", buffering=0) as source:
        try:
            start = 0 if os.path.exists(f"{path}.first") else _move_beginning(source, path, part_bytes)
            if start or os.fstat(source.fileno()).st_size > part_bytes:
                _move_end(source, path, start, part_bytes)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            # On a full disk the space is needed more than the rest of this part.
            logger.warning("not enough space to keep all of %s: %s", path, error.strerror)
            source.truncate(0)


def _move_beginning(source: FileIO, path: str, part_bytes: int) -> int:
    """Where the rest begins: at 0, or after the copied part if that cannot be removed."""
    with open(f"{path}.first", "xb", buffering=0) as copy:
        copied = _copy(source.fileno(), copy.fileno(), 0, part_bytes)
        return 0 if _take_off(source.fileno(), copied, copy) else copied


def _move_end(source: FileIO, path: str, start: int, part_bytes: int) -> None:
    """Leave an empty file, or nearly so; of what follows `start` the last part is kept."""
    target = f"{path}.previous"
    size = os.fstat(source.fileno()).st_size
    # A little more than a part: what was written since the last check.
    kept_from = start if size - start <= 2 * part_bytes else size - part_bytes
    is_gap = kept_from > start or os.path.exists(target)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(target)  # first, or both would take space at once
    with open(target, "xb", buffering=0) as copy:
        if is_gap:
            copy.write(_CUT_BEFORE)
        # To the end, but a worker may write as fast as this copies.
        copied = _copy(source.fileno(), copy.fileno(), kept_from, 2 * part_bytes)
        if not _take_off(source.fileno(), kept_from + copied, copy):
            source.truncate(0)


def _copy(source: int, target: int, start: int, most_bytes: int) -> int:
    """How many bytes it copied: all there were, or `most_bytes`."""
    copied = 0
    while copied < most_bytes:
        sent = os.sendfile(target, source, start + copied, min(_CHUNK_BYTES, most_bytes - copied))
        if not sent:
            break
        copied += sent
    return copied


def _take_off(handle: int, end: int, copy: FileIO) -> bool:
    """Remove what is before `end` from the file, in whole blocks; the rest stays, and is removed from the copy.

    False, and nothing is done, if the file system cannot.
    """
    block_bytes = os.fstatvfs(handle).f_bsize
    whole = (end - 1) // block_bytes * block_bytes  # its last block a file must keep
    if whole <= 0 or end - whole > copy.tell():
        return False
    # The call does this itself, but with the file locked: workers would wait for the disk.
    os.fdatasync(handle)
    if not _fallocate(handle, _FALLOC_FL_COLLAPSE_RANGE, 0, whole):
        return False
    copy.truncate(copy.tell() - (end - whole))
    return True


def cut_middle(path: str, limit_bytes: int) -> None:
    """Bring a file that is not written any more, and its parts, within the limit. Its end stays in it.

    Raises OSError.
    """
    first, previous = f"{path}.first", f"{path}.previous"
    if sum(map(_size, (first, previous, path))) <= limit_bytes:
        return
    with open(path, "r+b", buffering=0) as file:
        if not os.path.exists(first):
            with open(first, "xb", buffering=0) as copy:
                _copy(file.fileno(), copy.fileno(), 0, limit_bytes // PARTS)
        left = limit_bytes - _size(first)
        if _size(path) < left and os.path.exists(previous):
            with open(previous, "r+b", buffering=0) as before:
                _keep_end(before.fileno(), left - _size(path))
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(previous)
        _keep_end(file.fileno(), left)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _keep_end(handle: int, kept_bytes: int) -> None:
    """Move the end of a file to its beginning, behind a note of what was removed there; takes no space meanwhile."""
    target = os.pwrite(handle, _CUT_BEFORE, 0)
    source = os.fstat(handle).st_size - max(0, kept_bytes - target)
    while data := os.pread(handle, _CHUNK_BYTES, source):
        source += len(data)
        target += os.pwrite(handle, data, target)
    os.ftruncate(handle, target)


def take_out_middle(path: str, limit_bytes: int) -> None:
    """Give back the space of what is neither in the first nor in the last third of the limit. Raises OSError.

    Done when the file takes more than the limit; its length stays.
    """
    known = os.stat(path)
    if known.st_blocks * _STAT_BLOCK_BYTES <= limit_bytes:
        return
    part_bytes = limit_bytes // PARTS
    end = known.st_size - part_bytes
    if end <= part_bytes:
        return
    # Not with O_APPEND, which would make the write below an append.
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _punch_hole(handle, part_bytes, end - part_bytes)
        os.pwrite(handle, _CUT_HERE[: end - part_bytes], part_bytes)
    finally:
        os.close(handle)


def _punch_hole(handle: int, start: int, length: int) -> None:
    if not _fallocate(handle, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, start, length):
        code = ctypes.get_errno()
        raise OSError(code, f"the file system does not support sparse files ({os.strerror(code)})")


def _fallocate(handle: int, mode: int, start: int, length: int) -> bool:
    """Whether it succeeded; errno is the reason if not."""
    result: int = _libc.fallocate(handle, mode, ctypes.c_int64(start), ctypes.c_int64(length))
    return result == 0
