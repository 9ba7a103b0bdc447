"""Waiting for files to change (inotify) and for processes to end (pidfd), without polling."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")

_IN_MODIFY, _IN_CREATE, _IN_MOVED_TO = 0x2, 0x100, 0x80


class FolderWatch:
    """Wakes up when anything in a folder is written."""

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._handle = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        mask = _IN_MODIFY | _IN_CREATE | _IN_MOVED_TO
        if self._handle < 0 or libc.inotify_add_watch(self._handle, os.fsencode(folder), mask) < 0:
            raise OSError(ctypes.get_errno(), f"cannot watch {folder}")

    def until(self, look: Callable[[], T | None], timeout_s: float, pids: Iterable[int] = ()) -> T | None:
        """Return the first result of ``look`` that is not None or False; None at the time-out.

        It looks whenever a file of the folder was written or one of the processes ``pids`` ended.
        """
        ends_s = time.monotonic() + timeout_s
        handles = {self._handle, *_pidfds(pids)}
        try:
            while True:
                found = look()
                left_s = ends_s - time.monotonic()
                if found or left_s <= 0:
                    return found or None
                ready, _, _ = select.select(handles, [], [], left_s)
                with contextlib.suppress(BlockingIOError):
                    os.read(self._handle, 1 << 16)
                for handle in {*ready} - {self._handle}:
                    handles.discard(handle)
                    os.close(handle)
        finally:
            for handle in handles - {self._handle}:
                os.close(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._handle)


def _pidfds(pids: Iterable[int]) -> set[int]:
    handles = set()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handles.add(os.pidfd_open(pid))
    return handles
