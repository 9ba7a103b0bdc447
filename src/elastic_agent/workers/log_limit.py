"""Keeps the files that workers write their output to below a size.

Workers and their children append to these files themselves, with descriptors that they inherited, so nothing
can stand in between: a thread looks at the sizes now and then. How a file is made smaller depends on whether
somebody reads it on the way:

* Usually its content moves away and the file begins anew (what logrotate calls copytruncate): the first time
  to `stdout.log.first`, which stays, later to `stdout.log.previous`, which the next one replaces. So the
  beginning and the end are kept. What a worker writes between the last read and the cut is lost: the work of
  some microseconds, after every third of the limit.
* A file that torch follows (`tee`, filters) must keep its length: torch's reader stays at its offset, and in a
  file that begins anew it would wait for just as much to come again. There the middle is taken out and leaves
  a hole, which takes no space and reads as zeros. Few network file systems can do that; elsewhere such a file
  grows.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["PARTS", "LogLimit", "OutputFiles", "begin_anew", "take_out_middle"]

PARTS = 3
"""The beginning, what came before the newest part, and the newest part: each has as much of the limit."""

LOOK_EVERY_S = 5.0
"""A file may exceed its limit by what a worker writes in this time."""

_CHUNK_BYTES = 8 * 1024 * 1024
_STAT_BLOCK_BYTES = 512
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_CUT_HERE = b"\n[elastic-agent: output that stood here was removed, see --log-limit]\n"
_CUT_BEFORE = b"[elastic-agent: output between .first and this was removed, see --log-limit]\n"

logger = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class OutputFiles:
    """The files of a generation: those that only the workers use, and those that somebody follows."""

    plain: frozenset[str] = frozenset()
    followed: frozenset[str] = frozenset()


class LogLimit:
    """Looks after the files of the generation that runs, in a thread of its own.

    A thread, because a file system may hang and the agent's loop must not. Nobody ever waits for it.

    Args:
        limit_bytes: What a file may take, the parts of it that were moved away included.
        look_every_s: Pause between two looks.
    """

    def __init__(self, limit_bytes: int, look_every_s: float = LOOK_EVERY_S) -> None:
        self._limit_bytes = limit_bytes
        self._look_every_s = look_every_s
        self._files = OutputFiles()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._warned: set[str] = set()

    def watch(self, files: OutputFiles) -> None:
        """Look after these from now on, and no longer after earlier ones."""
        self._files = files
        if self._thread is None and (files.plain or files.followed):
            self._thread = threading.Thread(target=self._run, name="log-limit", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Look after nothing any more."""
        self._closed.set()

    def look(self) -> None:
        """Make smaller what is too large."""
        files = self._files
        for path in files.plain:
            self._apply(begin_anew, path)
        for path in files.followed:
            self._apply(take_out_middle, path)

    def _run(self) -> None:
        while not self._closed.wait(self._look_every_s):
            self.look()

    def _apply(self, cut: Callable[[str, int], None], path: str) -> None:
        try:
            cut(path, self._limit_bytes)
        except FileNotFoundError:
            pass  # not there yet, or removed by the user
        except OSError as error:
            if path not in self._warned:
                self._warned.add(path)
                logger.warning("%s cannot be kept below --log-limit: %s", path, error.strerror)


def begin_anew(path: str, limit_bytes: int) -> None:
    """Move the content away, once it is a third of the limit. Raises OSError."""
    part_bytes = limit_bytes // PARTS
    if os.stat(path).st_size <= part_bytes:
        return
    is_beginning = not os.path.exists(f"{path}.first")
    target = f"{path}.first" if is_beginning else f"{path}.previous"
    had_previous = not is_beginning and os.path.exists(target)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(target)  # first, or both would take space at once
    with open(path, "rb") as source:
        try:
            with open(target, "xb", buffering=0) as copy:
                if had_previous:
                    copy.write(_CUT_BEFORE)
                # A worker may write as fast as this copies.
                _copy(source.fileno(), copy.fileno(), most_bytes=limit_bytes)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            # On a full disk the space is needed more than the rest of this part.
            logger.warning("no space to keep all of %s: %s", target, error.strerror)
    os.truncate(path, 0)


def _copy(source: int, target: int, most_bytes: int) -> None:
    offset = 0
    while offset < most_bytes:
        sent = os.sendfile(target, source, offset, min(_CHUNK_BYTES, most_bytes - offset))
        if not sent:
            return
        offset += sent


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
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    if _libc.fallocate(handle, mode, ctypes.c_int64(start), ctypes.c_int64(length)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"its file system has no holes ({os.strerror(code)})")
