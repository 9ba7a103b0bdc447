"""Keeping what workers print to the console, in one bounded file for each, without ever blocking.

One thread writes all files: a disk may be slow, and a file server may not answer. Output that the thread cannot take in
time is left out of the file, and a line in it says how much.
"""

from __future__ import annotations

import _thread
import contextlib
import os
from _queue import SimpleQueue  # the module `queue` would import `threading`

from elastic_agent import linux

PARTS = 3
"""The beginning, the end and what is written until the next cut: each has as much of the limit."""

CUT_HERE = b"\n[elastic-agent: output was removed here, see --log-limit]\n"

_WAITING_BYTES = 768 * 1024
"""The most output of a worker that may wait for the thread."""
_ENTRY_BYTES = 256
"""The most that Python needs for an entry of the queue."""
_CHUNK_BYTES = 64 * 1024
_TOO_SLOW = "the disk was too slow"
_MISSING = "\n[elastic-agent: {} bytes of output are missing here: {}]\n"


class KeptOutput:
    """The file of one worker; `put` and `close` are for the guard's own thread, the rest for the one that writes.

    Each counter is changed by one of the threads only. `limit_bytes`: what the file may take, 0: anything.
    """

    def __init__(self, path: str, limit_bytes: int, queue: SimpleQueue[_Entry | None]) -> None:
        self.path = path
        self._part_bytes = limit_bytes // PARTS
        self._queue = queue
        self._queued_bytes = self._done_bytes = 0
        self._left_out = 0
        """Bytes since the last entry."""
        self._fd: int | None = None
        self._size = self._cut_end = 0
        self._missing = 0
        self._reason = _TOO_SLOW

    def put(self, data: bytes) -> None:
        """Have `data` appended, unless too much is waiting already."""
        cost = len(data) + _ENTRY_BYTES
        if self._queued_bytes - self._done_bytes + cost > _WAITING_BYTES:
            self._left_out += len(data)
            return
        self._queued_bytes += cost
        self._queue.put((self, data, self._left_out))
        self._left_out = 0

    def close(self) -> None:
        """Have the file closed when all is written; call once."""
        self._queue.put((self, None, self._left_out))

    def write(self, data: bytes | None, left_out: int) -> None:
        """Append `data`, before which so many bytes were left out; None: close the file."""
        self._missing += left_out
        note = _MISSING.format(self._missing, self._reason).encode() if self._missing else b""
        try:
            self._keep_ends()
            if note or data:
                self._append(note + (data or b""))
            self._missing, self._reason = 0, _TOO_SLOW
        except OSError as error:
            self._missing += len(data or b"")
            self._reason = error.strerror or _TOO_SLOW
        if data is not None:
            self._done_bytes += len(data) + _ENTRY_BYTES
        elif self._fd is not None:
            with contextlib.suppress(OSError):  # NFS tells of a full disk now
                os.close(self._fd)

    def _append(self, data: bytes) -> None:
        if self._fd is None:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._fd, data[written:] if written else data, self._size + written)
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += written

    def _keep_ends(self) -> None:
        """Remove the middle of the file if it takes more than its limit. Its length stays, for those who follow it."""
        start, end = self._part_bytes, self._size - self._part_bytes
        is_small = self._size - max(self._cut_end, start) < 2 * start + len(CUT_HERE)
        if self._fd is None or not start or is_small:
            return
        try:
            linux.punch_hole(self._fd, start, end - start)
        except OSError:  # such as NFS 3
            self._move_end(self._fd, start, end)
        else:
            os.pwrite(self._fd, CUT_HERE, start)
            self._cut_end = end

    def _move_end(self, fd: int, start: int, end: int) -> None:
        """Write the end of the file over its middle, where the file system makes no holes."""
        start += os.pwrite(fd, CUT_HERE, start)
        while moved := os.pread(fd, _CHUNK_BYTES, end):
            os.pwrite(fd, moved, start)
            start, end = start + len(moved), end + len(moved)
        os.ftruncate(fd, start)
        self._size = start


_Entry = tuple[KeptOutput, bytes | None, int]


class KeptOutputs:
    """The files of all workers, and the thread that writes them, which is started with the first one."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Entry | None] = SimpleQueue()
        self._ended = _thread.allocate_lock()

    def open(self, path: str, limit_bytes: int) -> KeptOutput:
        """Return a new file, made when something is put into it. Raises RuntimeError: no thread can be started."""
        if not self._ended.locked():
            _thread.start_new_thread(self._write_all, ())
            self._ended.acquire()
        return KeptOutput(path, limit_bytes, self._queue)

    def finish(self, patience_s: float) -> None:
        """Wait until all is written, at most `patience_s`. Nothing may be opened any more."""
        if self._ended.locked():
            self._queue.put(None)
            self._ended.acquire(timeout=patience_s)

    def _write_all(self) -> None:
        while (entry := self._queue.get()) is not None:
            file, data, left_out = entry
            file.write(data, left_out)
        self._ended.release()
