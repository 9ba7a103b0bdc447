"""When a thread ended, by the kernel's own clock.

A process that waits for the end of another one learns of it when it is given a processor, which takes milliseconds on a
busy machine. With perf_event_open(2), the kernel itself writes down when a thread exits: one record in a ring buffer,
which is read afterwards. Users may have this for their own processes if ``kernel.perf_event_paranoid`` is 2, the
kernel's default, or less; containers, Debian and Ubuntu usually refuse it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import time

_SYSCALLS = {"x86_64": 298, "aarch64": 241}
_CLOEXEC = 8

_ATTRIBUTES_BYTES = 128
_SOFTWARE, _DUMMY = 1, 9
_SAMPLE_TIME = 1 << 2
_EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 5, 1 << 6
_TASK = 1 << 13
"""Write a record when the thread forks another one, and when it exits."""
_SAMPLE_ID_ALL, _USE_CLOCK_ID = 1 << 18, 1 << 25
_WRITE_BACKWARD = 1 << 27
"""The newest record comes first, and overwrites the oldest."""

_HEAD = struct.Struct("Q")
_HEAD_OFFSET = 1024
_RECORD = struct.Struct("IHHIIIIQ")
"""Type, flags, size; process, parent, thread, parent thread; nanoseconds."""
_EXIT = 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class ExitMoment:
    """The end of one thread. Holds a descriptor and two pages of memory."""

    def __init__(self, tid: int) -> None:
        """``tid``: of the thread, or of a process: its main thread. Raises OSError if the kernel refuses."""
        number = _SYSCALLS.get(platform.machine())
        if number is None:
            raise OSError(f"perf_event_open is not known on {platform.machine()}")
        attributes = ctypes.create_string_buffer(_attributes(), _ATTRIBUTES_BYTES)
        fd = _libc.syscall(number, attributes, tid, -1, -1, ctypes.c_ulong(_CLOEXEC))
        if fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        try:
            # Read-only: the kernel overwrites old records. The map has a descriptor of its own.
            self._map = mmap.mmap(fd, 2 * mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)

    @property
    def at_boottime_s(self) -> float | None:
        """When the thread ended (CLOCK_BOOTTIME); None if it has not, or was gone before."""
        (head,) = _HEAD.unpack_from(self._map, _HEAD_OFFSET)
        records = self._map[mmap.PAGESIZE : 2 * mmap.PAGESIZE]
        record = _RECORD.unpack_from(2 * records, head % mmap.PAGESIZE)
        return record[-1] / 1e9 if record[0] == _EXIT else None

    def close(self) -> None:
        """Release it."""
        self._map.close()


def _attributes() -> bytes:
    """See perf_event_open(2): ``struct perf_event_attr``."""
    flags = _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR | _TASK | _SAMPLE_ID_ALL | _USE_CLOCK_ID | _WRITE_BACKWARD
    return struct.pack(
        f"IIQQQQQIIQQQQIi{_ATTRIBUTES_BYTES - 96}x",
        _SOFTWARE,
        _ATTRIBUTES_BYTES,
        _DUMMY,
        0,  # sample_period
        _SAMPLE_TIME,
        0,  # read_format
        flags,
        0,  # wakeup_events
        0,  # bp_type
        0,  # config1
        0,  # config2
        0,  # branch_sample_type
        0,  # sample_regs_user
        0,  # sample_stack_user
        time.CLOCK_BOOTTIME,
    )
