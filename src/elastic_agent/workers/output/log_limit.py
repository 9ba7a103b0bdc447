"""Keeps the files that workers write their output to below a size.

Workers and their children append to these files with descriptors of their own, and others may read them meanwhile:
so a file keeps its length, and its middle becomes a hole, which takes no space and reads as zeros.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Collection

from elastic_agent import linux
from elastic_agent.workers.guard.kept_output import CUT_HERE, PARTS

KEPT_BYTES = 16 * 1024**2
"""The space for what a process prints on the console, unless --log-limit says otherwise."""

CHECK_EVERY_S = 5.0
"""A file may exceed its limit by what a worker writes in this time, as long as it runs."""

CLOSE_S = 5.0
"""The longest time that the last check may take."""

_STAT_BLOCK_BYTES = 512

logger = logging.getLogger(__name__)


class LogLimit:
    """Limits the files of the running generation, and at its end once more, in a thread of its own.

    A thread, because a file system may hang and the agent's loop must not.

    Args:
        limit_bytes: The space that a file may take.
        check_every_s: Pause between two checks.
    """

    def __init__(self, limit_bytes: int, check_every_s: float = CHECK_EVERY_S) -> None:
        self._limit_bytes = limit_bytes
        self._check_every_s = check_every_s
        self._files: Collection[str] = ()
        self._written: queue.SimpleQueue[Collection[str] | None] = queue.SimpleQueue()
        """Files that no worker writes to any more; None: there will be no others."""
        self._thread: threading.Thread | None = None
        self._warned: set[str] = set()

    def watch(self, paths: Collection[str]) -> None:
        """Limit these files from now on; earlier ones are not written any more."""
        self._written.put(self._files)
        self._files = paths
        if self._thread is None and paths:
            self._thread = threading.Thread(target=self._run, name="log-limit", daemon=True)
            self._thread.start()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """End, as no worker writes any more. Waits for the last check, within its time limit."""
        self._written.put(self._files)
        self._written.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            try:
                paths = self._written.get(timeout=self._check_every_s)
            except queue.Empty:
                paths = self._files
            if paths is None:
                return
            for path in paths:
                self._limit(path)

    def _limit(self, path: str) -> None:
        try:
            take_out_middle(path, self._limit_bytes)
        except FileNotFoundError:
            pass  # not there yet, or removed by the user
        except OSError as error:
            if path not in self._warned:
                self._warned.add(path)
                logger.warning("cannot keep %s below --log-limit: %s", path, error.strerror)


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
        linux.punch_hole(handle, part_bytes, end - part_bytes)
        os.pwrite(handle, CUT_HERE[: end - part_bytes], part_bytes)
    finally:
        os.close(handle)
