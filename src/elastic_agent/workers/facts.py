"""Facts about the machine when a worker fails: memory, kernel log, folders, limits. Takes milliseconds.

Looking at a folder may block as long as a file server hangs: not for an event loop.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from elastic_agent.linux import cgroups
from elastic_agent.printable import size_text, without_surrogates

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
"""The longest time that looking at folders may take."""

Look = Callable[[], str]
"""Makes one observation; empty: there is none."""


@dataclass(frozen=True)
class Started:
    """The way in which workers were started."""

    folder: str = ""
    """The working directory; empty: not known."""
    python: str = ""
    """The Python that runs them; empty: not known, or another program."""
    other_machines: int = 0
    """The number of machines besides this one that have workers of the generation."""


UNKNOWN = Started()


@dataclass(frozen=True)
class Baseline:
    """The state of the machine when workers were started, with which it is compared when one fails."""

    oom_kills: int | None
    """The number of processes of this cgroup that the kernel has killed because the memory was used up; None:
    not known."""
    monotonic_s: float
    started: Started


def baseline(started: Started = UNKNOWN) -> Baseline:
    """Take the baseline; reads a few files in memory, so this never blocks."""
    return Baseline(_oom_kills(), time.monotonic(), started)


def gather(looks: Mapping[str, Look], found: dict[str, str]) -> None:
    """Add what each look finds to ``found``, under its name. One that fails is left out, and the others are not
    affected."""
    for name, look in looks.items():
        with contextlib.suppress(Exception):
            if value := look():
                found[name] = without_surrogates(value)[:_LONGEST]


def worker_facts(before: Baseline) -> dict[str, str]:
    """Return observations that the first message about a failed worker uses: ``oom_kills`` (a number) and texts.

    Takes about a second at most, for the working directory may be on a file server that does not answer.
    """
    facts: dict[str, str] = {}
    memory: dict[str, Look] = {"oom_kills": partial(_kills_since, before), "memory_limit": _memory_limit}
    gather({**memory, "memory_available": _available_memory, **_LIMITS}, facts)
    folder, python = before.started.folder, before.started.python
    how: dict[str, Look] = {
        "started_in": lambda: folder and f"the agent was started in {folder}",
        "python": lambda: python and f"the workers run {python}",
        "other_machines": lambda: str(before.started.other_machines or ""),
    }
    gather(how, facts)
    return facts | _in_time(
        {
            "working_folder": partial(_what_became_of, folder),
            "other_environment": lambda: _other_environment(python, os.environ),
        }
    )


def machine_facts(before: Baseline, killed: Collection[int], folders: Iterable[str]) -> dict[str, str]:
    """Return all facts about the machine by name, as texts for people.

    Args:
        before: taken when the workers were started.
        killed: pids of the workers that a signal ended.
        folders: in which workers write, besides their working directory and local file systems.
    """
    facts = worker_facts(before)
    if killed:
        gather({"kernel_log": lambda: _last_kernel_message(before.monotonic_s, killed)}, facts)
    written = [*filter(None, [before.started.folder]), *folders]
    disks: dict[str, Look] = {
        "shm": partial(_space, _SHM),
        "disk_full": lambda: "; ".join(_full([*written, *_local_folders()])),
    }
    return facts | _in_time(disks)


def _in_time(looks: Mapping[str, Look]) -> dict[str, str]:
    """Return what can be found out about folders while a file server may hang."""
    found: dict[str, str] = {}
    looking = threading.Thread(target=gather, args=(looks, found), name="folder-facts", daemon=True)
    looking.start()
    looking.join(_FOLDERS_S)
    return dict(found)


# -- memory ---------------------------------------------------------------------------------------


def _memory_cgroups() -> Iterator[str]:
    """Yield folders that may be this process's memory cgroup, the likeliest first.

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
    """Return the number with this name in a file. Raises OSError or ValueError: there is none."""
    with open(path, encoding="ascii", errors="replace") as file:
        for line in file:
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    raise ValueError(name)


def _kills_since(before: Baseline) -> str:
    after = _oom_kills()
    return str(max(0, after - before.oom_kills)) if after is not None and before.oom_kills is not None else ""


def _memory_limit() -> str:
    """Return the smallest limit of this process's cgroup and those that contain it; empty without one."""
    limits = []
    for folder in _memory_cgroups():
        while len(folder) >= len(_CGROUP_ROOT):
            limits += _limits_in(folder)
            folder = os.path.dirname(folder)
    limit = min(limits, default=_NO_LIMIT)
    return size_text(limit) if limit < _NO_LIMIT else ""


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
    return f"{size_text(known['MemAvailable'])} of {size_text(known['MemTotal'])} available"


# -- the kernel's log -----------------------------------------------------------------------------


def _last_kernel_message(since_s: float, pids: Collection[int]) -> str:
    """Return the last message on one of these processes, or else on the memory or a GPU; empty if there is none."""
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
    """Yield the seconds since boot and the text of each message; none where the log may not be read."""
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


# -- environments ---------------------------------------------------------------------------------


def _other_environment(python: str, environ: Mapping[str, str]) -> str:
    """Say that workers run the agent's Python although another environment is active; empty: none, or not known."""
    first = shutil.which("python", path=environ.get("PATH"))
    if python != sys.executable or first is None:
        return ""
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        folder = environ.get(variable, "")
        is_active = bool(folder) and os.path.realpath(os.path.dirname(first)) == os.path.realpath(
            f"{folder}/bin"
        )
        if is_active and os.path.realpath(folder) != os.path.realpath(sys.prefix):
            return f"the workers run the Python of {sys.prefix}, but the active environment is {folder}"
    return ""


# -- folders --------------------------------------------------------------------------------------


def _what_became_of(folder: str) -> str:
    """Say that the working directory is gone, or that another has its name; empty: neither, or it is not known."""
    if not folder:
        return ""
    try:
        there = os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return f"the folder the run was started in is gone: {folder}"
    try:
        is_same = os.path.samestat(there, os.stat("."))
    except OSError:  # a file server has removed it
        is_same = False
    return "" if is_same else f"the folder the run was started in was replaced by another: {folder}"


def _local_folders() -> Iterator[str]:
    """Yield where local file systems are mounted for writing."""
    with contextlib.suppress(OSError), open("/proc/self/mounts", "rb") as file:
        for line in file:
            _, folder, kind, options, *_ = line.split()
            if os.fsdecode(kind) in _LOCAL_FILE_SYSTEMS and b"rw" in options.split(b","):
                yield os.fsdecode(folder.replace(rb"\040", b" "))


def _full(folders: Iterable[str]) -> list[str]:
    """Return those on a file system that is full, each with the space left."""
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
    return f"{size_text(free)} of {size_text(total)} free"


# -- limits ---------------------------------------------------------------------------------------


def _bytes(value: int) -> str:
    return _limit(value) if value == resource.RLIM_INFINITY else size_text(value)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _address_space() -> str:
    known = (("ulimit -v", resource.RLIMIT_AS), ("ulimit -d", resource.RLIMIT_DATA))
    limits = {name: resource.getrlimit(which)[0] for name, which in known}
    return ", ".join(
        f"{name}: {size_text(limit)}" for name, limit in limits.items() if limit != resource.RLIM_INFINITY
    )


_LIMITS: Mapping[str, Look] = {
    "address_space": _address_space,
    "open_files": lambda: f"limit {_limit(resource.getrlimit(resource.RLIMIT_NOFILE)[0])}",
    "memlock_limit": lambda: f"limit {_bytes(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])}",
    "process_limit": lambda: f"limit {_limit(resource.getrlimit(resource.RLIMIT_NPROC)[0])}",
}
"""The limits of this process, which its workers inherit."""
