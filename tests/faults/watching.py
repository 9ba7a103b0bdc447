"""Waiting for files to change, by inotify: no polling, no sleeping."""

from __future__ import annotations

import ctypes
import os
import select
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

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

    def until(self, look: Callable[[], T | None], timeout_s: float) -> T | None:
        """The first result of ``look`` that is not None or False; None at the time-out."""
        ends_s = time.monotonic() + timeout_s
        while True:
            found = look()
            if found:
                return found
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                return None
            # at least once a second, for conditions that no file tells (a process that ended)
            select.select([self._handle], [], [], min(left_s, 0.5))
            try:
                os.read(self._handle, 1 << 16)
            except BlockingIOError:
                continue

    def __enter__(self) -> FolderWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._handle)
