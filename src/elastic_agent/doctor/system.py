"""Checks of this machine: limits, shared memory, folders."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from .findings import Finding, error, warning
from .request import Request

GIB = 2**30
LEAST_FREE = GIB // 4
"""Bytes that a folder for logs and state should have free."""
LEAST_SHM = 512 * 2**20
"""Bytes of /dev/shm: data loaders and NCCL pass their data through it; Docker's default of 64 MiB is not enough."""
FILES_BESIDE_PEERS = 256
"""Descriptors of a worker besides three for each other worker: libraries, data loaders, logs."""


def soft_limit(which: int) -> int:
    """Return a soft limit of this process."""
    return resource.getrlimit(which)[0]


def check_start(request: Request) -> Iterator[Finding]:
    """Report for what an agent would end at once."""
    for refusal in request.refusals():
        cause, _, remedy = refusal.partition("; ")
        yield error("start", cause, remedy)


def check_limits(request: Request, limit_of: Callable[[int], int] = soft_limit) -> Iterator[Finding]:
    """Check the limit of open files."""
    files = limit_of(resource.RLIMIT_NOFILE)
    needed = 3 * request.most * (request.slots or 8) + FILES_BESIDE_PEERS
    if files != resource.RLIM_INFINITY and files < needed:
        yield warning(
            "open-files",
            f"a process can have only {files} open files; about {needed} are needed for this number of workers "
            'and data loaders ("Too many open files")',
            "raise the limit: ulimit -n, in a service LimitNOFILE",
        )


def check_shared_memory(folder: str = "/dev/shm") -> Iterator[Finding]:
    """Check that /dev/shm exists and is large enough."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as failure:
        yield error("shared-memory", f"{folder}: {failure.strerror}", "mount a tmpfs there")
        return
    if usage.total < LEAST_SHM or usage.free < LEAST_SHM // 2:
        yield warning(
            "shared-memory",
            f"{folder} has {size(usage.free)} free of {size(usage.total)}; data loaders with workers, and NCCL, "
            'fail when it is full ("Bus error", "No space left on device")',
            "enlarge it: docker run --shm-size=8g, in Kubernetes an emptyDir with medium Memory, else mount -o "
            "remount,size=8G; or remove old files from it",
        )


def check_folders(request: Request) -> Iterator[Finding]:
    """Check that the agent's own folders are writable and have space."""
    for option, folder in request.folders.items():
        place = _existing(folder)
        if not os.path.isdir(place) or not os.access(place, os.W_OK | os.X_OK) or _is_read_only(place):
            yield error(
                "folder",
                f"{option} {folder} cannot be written: {place} is not a writable directory",
                f"make it writable, or set another folder with {option}",
            )
            continue
        free = shutil.disk_usage(place).free
        if free < LEAST_FREE:
            yield warning(
                "disk-space",
                f"{option} {folder} has only {size(free)} free",
                f"free some space, or set another folder with {option}",
            )


def _is_read_only(place: Path) -> bool:
    return bool(os.statvfs(place).f_flag & os.ST_RDONLY)


def _existing(folder: Path) -> Path:
    return next((place for place in (folder, *folder.parents) if os.path.lexists(place)), Path("/"))


def size(number: float) -> str:
    """Return bytes in the largest fitting unit."""
    for unit, factor in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= factor:
            return f"{number / factor:.{1 if number < 10 * factor else 0}f} {unit}"
    return f"{number:.0f} bytes"


def limit_text(which: int) -> str:
    """Return a soft limit of this process, as text."""
    value = soft_limit(which)
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def memory_text() -> str:
    """Return the machine's memory in whole GiB."""
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / GIB:.0f} GiB"


def shm_text(folder: str = "/dev/shm") -> str:
    """Return the size of /dev/shm."""
    try:
        return size(shutil.disk_usage(folder).total)
    except OSError:
        return "none"
