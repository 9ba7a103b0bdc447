"""Facts about the machine when a worker fails: memory, kernel log, disks, limits. Takes milliseconds.

Looking at a folder may block as long as a file server hangs: not for an event loop.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from elastic_agent.linux import cgroups

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_CGROUP_ROOT = "/sys/fs/cgroup"
_NO_LIMIT = 2**60
"""Bytes; the kernel writes a number about as large where there is no limit."""
_FULL_FRACTION = 0.01
_FULL_BYTES = 16 * 1024**2
_SHM = "/dev/shm"
_LOCAL_FILE_SYSTEMS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "overlay"})
"""Types that answer at once, as a file server may not."""
_KERNEL_LOG = "/dev/kmsg"
_MOST_RECORDS = 20_000
_LOG_SLACK_S = 1.0
"""The kernel's log counts time a little differently from CLOCK_MONOTONIC."""
_NUMBER = re.compile(r"\b[0-9]+\b")
_KILL = re.compile(r"[Oo]ut of memory|Killed process|segfault|general protection|traps?:|NVRM: Xid")
_OF_THE_MACHINE = re.compile(r"[Oo]ut of memory|Killed process|NVRM: Xid")
"""These may concern any process; a crash concerns the one that it names."""
_LONGEST = 400
_FOLDERS_S = 1.0
"""How long looking at folders may take."""


@dataclass(frozen=True)
class Baseline:
    """The state of the machine when workers were started, with which it is compared when one fails."""

    oom_kills: int | None
    """How many processes of this cgroup the kernel has killed because the memory was used up; None: not known."""
    monotonic_s: float


def baseline() -> Baseline:
    """Take it; reads a few files in memory, so this never blocks."""
    return Baseline(_oom_kills(), time.monotonic())


def memory_facts(before: Baseline) -> dict[str, str]:
    """Whether memory was used up, and how much there is: ``oom_kills`` (a number) and texts. Never blocks."""
    facts: dict[str, str] = {}
    after = _oom_kills()
    if after is not None and before.oom_kills is not None:
        facts["oom_kills"] = str(max(0, after - before.oom_kills))
    limit = _memory_limit()
    if limit is not None:
        facts["memory_limit"] = amount(limit)
    return facts | _one("memory_available", _available_memory())


def machine_facts(before: Baseline, killed: Collection[int], folders: Iterable[str]) -> dict[str, str]:
    """All facts about the machine by name, as texts for people.

    Args:
        before: taken when the workers were started.
        killed: pids of the workers that a signal ended.
        folders: in which workers write, besides local file systems.
    """
    facts = memory_facts(before) | _limits()
    if killed:
        facts |= _one("kernel_log", _last_kernel_message(before.monotonic_s, killed))
    found: list[str] = []
    looking = threading.Thread(
        target=lambda: found.extend(_full([*folders, *_local_folders()])), name="disk-facts", daemon=True
    )
    looking.start()
    looking.join(_FOLDERS_S)
    return facts | _one("shm", _space(_SHM)) | _one("disk_full", "; ".join(found))


def amount(number: int) -> str:
    """A number of bytes for people, such as "1.5 GB"."""
    size = float(number)
    unit = _UNITS[0]
    for unit in _UNITS:
        if size < 1000 or unit == _UNITS[-1]:
            break
        size /= 1000
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"


def _one(name: str, value: str) -> dict[str, str]:
    return {name: value[:_LONGEST]} if value else {}


# -- memory ---------------------------------------------------------------------------------------


def _memory_cgroups() -> Iterator[str]:
    """Folders that may be this process's memory cgroup, the likeliest first.

    In a container, the cgroup may be mounted as the root although /proc shows its path on the host.
    """
    try:
        paths = cgroups()
    except OSError:
        return
    for controller, root in (("", _CGROUP_ROOT), ("memory", f"{_CGROUP_ROOT}/memory")):
        if controller in paths:
            yield f"{root}{paths[controller]}".rstrip("/")
            yield root


def _oom_kills() -> int | None:
    for folder in _memory_cgroups():
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError, ValueError):
                return _counter(f"{folder}/{name}", "oom_kill")
    return None


def _counter(path: str, name: str) -> int:
    """Raises OSError or ValueError: there is none."""
    with open(path, encoding="ascii", errors="replace") as file:
        for line in file:
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    raise ValueError(name)


def _memory_limit() -> int | None:
    """The smallest limit of this process's cgroup and those that contain it; None without one."""
    limits = []
    for folder in _memory_cgroups():
        while len(folder) >= len(_CGROUP_ROOT):
            limits += _limits_in(folder)
            folder = os.path.dirname(folder)
    limit = min(limits, default=_NO_LIMIT)
    return limit if limit < _NO_LIMIT else None


def _limits_in(folder: str) -> list[int]:
    found = []
    for name in ("memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(f"{folder}/{name}", encoding="ascii") as file:
            found.append(int(file.read()))
    return found


def _available_memory() -> str:
    known: dict[str, int] = {}
    with (
        contextlib.suppress(OSError, ValueError, IndexError),
        open("/proc/meminfo", encoding="ascii") as file,
    ):
        for line in file:
            name, _, value = line.partition(":")
            known[name] = int(value.split()[0]) * 1024
    if "MemTotal" not in known or "MemAvailable" not in known:
        return ""
    return f"{amount(known['MemAvailable'])} of {amount(known['MemTotal'])} available"


# -- the kernel's log -----------------------------------------------------------------------------


def _last_kernel_message(since_s: float, pids: Collection[int]) -> str:
    """The last message on one of these processes, or else on the memory or a GPU; empty if there is none."""
    own = other = ""
    numbers = {str(pid) for pid in pids}
    for at_s, message in _kernel_messages():
        if at_s < since_s - _LOG_SLACK_S or not _KILL.search(message):
            continue
        if not numbers.isdisjoint(_NUMBER.findall(message)):
            own = message
        elif _OF_THE_MACHINE.search(message):
            other = message
    return own or other


def _kernel_messages() -> Iterator[tuple[float, str]]:
    """Seconds since boot, and text; none where the log may not be read."""
    try:
        fd = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        for _ in range(_MOST_RECORDS):
            try:
                head, _, rest = os.read(fd, 8192).partition(b";")
            except BrokenPipeError:
                continue  # messages were overwritten before they were read
            with contextlib.suppress(ValueError, IndexError, OverflowError):
                at_s = int(head.split(b",")[2]) / 1e6
                yield at_s, rest.partition(b"\n")[0].decode(errors="replace")
    except OSError:  # the end
        return
    finally:
        os.close(fd)


# -- disks ----------------------------------------------------------------------------------------


def _local_folders() -> Iterator[str]:
    """Where local file systems are mounted for writing."""
    with contextlib.suppress(OSError), open("/proc/self/mounts", "rb") as file:
        for line in file:
            _, folder, kind, options, *_ = line.split()
            if os.fsdecode(kind) in _LOCAL_FILE_SYSTEMS and b"rw" in options.split(b","):
                yield os.fsdecode(folder.replace(rb"\040", b" "))


def _full(folders: Iterable[str]) -> list[str]:
    """Those on a file system that is full, each with the space left."""
    found = []
    seen = set()
    for folder in folders:
        with contextlib.suppress(OSError):
            device = os.stat(folder).st_dev
            if device not in seen and _is_full(folder):
                found.append(f"{folder}: {_space(folder)}")
            seen.add(device)
    return found


def _is_full(folder: str) -> bool:
    known = os.statvfs(folder)
    free, total = known.f_bavail * known.f_frsize, known.f_blocks * known.f_frsize
    is_full = bool(total) and free < min(_FULL_BYTES, _FULL_FRACTION * total)
    return is_full or bool(known.f_files and not known.f_favail)


def _space(folder: str) -> str:
    try:
        known = os.statvfs(folder)
    except OSError:
        return ""
    if known.f_files and not known.f_favail:
        return f"all {known.f_files} inodes are used"
    free, total = known.f_bavail * known.f_frsize, known.f_blocks * known.f_frsize
    return f"{amount(free)} of {amount(total)} free"


# -- limits ---------------------------------------------------------------------------------------


def _limits() -> dict[str, str]:
    """The limits of this process, which its workers inherit."""
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "open_files": f"limit {_limit(resource.getrlimit(resource.RLIMIT_NOFILE)[0])}",
        "memlock_limit": f"limit {_limit(locked) if locked == resource.RLIM_INFINITY else amount(locked)}",
        "process_limit": f"limit {_limit(resource.getrlimit(resource.RLIMIT_NPROC)[0])}",
    }


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
