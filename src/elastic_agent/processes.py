"""Processes as /proc shows them.

Everything is read as bytes: the kernel cuts a process's name at 15 of them, be it in the middle of a character.

Used by the guard, so it imports little: no `typing`, no `dataclasses`.
"""

from __future__ import annotations

import contextlib
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


class Process:
    """A process as one look at /proc showed it.

    `key` tells it from a later process with the same number: beside the number it has `start_ticks`, when it
    started, in clock ticks since boot.
    """

    __slots__ = ("dead", "frozen", "group", "key", "parent", "pid", "start_ticks", "state")

    def __init__(self, pid: int, state: str, parent: int, group: int, threads: int, start_ticks: int) -> None:
        self.pid = pid
        self.state = state
        self.parent = parent
        self.group = group
        self.start_ticks = start_ticks
        self.key = (pid, start_ticks)
        # The first thread may have ended before others: then the process looks like a zombie, but runs.
        self.dead = state in "ZX" and threads <= 1
        # By a signal or a debugger.
        self.frozen = state in "Tt"


def read_process(pid: int) -> Process | None:
    """None when there is no such process."""
    try:
        fields = stat_fields(pid)
    except OSError:
        return None
    parent, group, threads, start_ticks = (int(fields[i]) for i in (1, 2, 17, 19))
    return Process(pid, fields[0].decode(), parent, group, threads, start_ticks)


def stat_fields(pid: int) -> list[bytes]:
    """/proc/PID/stat from the state on (proc(5) counts it as field 3). Raises OSError."""
    # The name before it stands in brackets and may itself hold brackets and blanks.
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def process_ids() -> list[int]:
    """All processes that can be seen here."""
    with os.scandir("/proc") as entries:
        return [int(entry.name) for entry in entries if entry.name.isdigit()]


def all_processes() -> Iterator[Process]:
    """Those that are still there when their turn comes."""
    for pid in process_ids():
        process = read_process(pid)
        if process is not None:
            yield process


def start_ticks(pid: int) -> int | None:
    """When the process started, or None if there is no such process (a zombie counts as gone)."""
    process = read_process(pid)
    return None if process is None or process.dead else process.start_ticks


def is_frozen(pid: int) -> bool:
    """Whether the process was stopped by a signal or a debugger."""
    process = read_process(pid)
    return process is not None and process.frozen


def catches(pid: int, signum: int) -> bool:
    """Whether the process has a handler for this signal (one without would die of it)."""
    return _in_mask(pid, b"SigCgt:", signum) is True


def ignores(pid: int, signum: int) -> bool | None:
    """Whether the process ignores this signal; None if it is gone."""
    return _in_mask(pid, b"SigIgn:", signum)


def _in_mask(pid: int, mask: bytes, signum: int) -> bool | None:
    with contextlib.suppress(OSError):
        for line in _read(f"/proc/{pid}/status").splitlines():
            if line.startswith(mask):
                return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return None


def process_name(pid: int) -> str:
    """What `ps` calls it, or nothing when it is gone."""
    return _name(f"/proc/{pid}/comm")


def thread_names() -> list[str]:
    """The names of this process's threads, the first one first."""
    first = str(
        os.getpid()
    )  # others may have lower numbers: the system begins again when it has used them all
    numbers = sorted(os.listdir("/proc/self/task"), key=lambda number: (number != first, int(number)))
    return [name for number in numbers if (name := _name(f"/proc/self/task/{number}/comm"))]


def environment(pid: int) -> dict[str, str]:
    """The variables that the process was started with. Raises OSError: it is gone, or another user's."""
    pairs = [
        one.decode(errors="replace").partition("=") for one in _read(f"/proc/{pid}/environ").split(b"\0")
    ]
    return {name: value for name, equals, value in pairs if equals}


def _name(path: str) -> str:
    with contextlib.suppress(OSError):
        return _read(path).decode(errors="replace").strip()
    return ""


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        chunks = []
        while chunk := os.read(fd, 1 << 16):
            chunks.append(chunk)
        return b"".join(chunks)
    finally:
        os.close(fd)
