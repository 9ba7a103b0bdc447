"""Checks of this machine: limits, shared memory, folders, variables that name interfaces."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from .findings import Finding, error, warning
from .request import Request

_LOCAL_BRIDGES = ("docker", "virbr", "br-", "veth", "cni", "lo")
"""Beginnings of names of interfaces that no other machine reaches."""
GIB = 2**30
LEAST_FREE = GIB // 4
"""Bytes that a folder for logs and state should have free."""
LEAST_SHM = 512 * 2**20
"""Bytes of /dev/shm: data loaders and NCCL pass their data through it; Docker's default of 64 MiB is not enough."""
UNLIMITED = "ulimit -v unlimited; in a service LimitAS=infinity"
FILES_BESIDE_PEERS = 256
"""Descriptors of a worker besides three for each other worker: libraries, data loaders, logs."""


def soft_limit(which: int) -> int:
    """Return a soft limit of this process."""
    return resource.getrlimit(which)[0]


def check_start(request: Request) -> Iterator[Finding]:
    """Report for what an agent would end at once."""
    for refusal in request.refusals():
        yield error("start", refusal.problem, refusal.remedy)


def check_limits(request: Request, limit_of: Callable[[int], int] = soft_limit) -> Iterator[Finding]:
    """Check the limits of open files and address space."""
    files = limit_of(resource.RLIMIT_NOFILE)
    needed = 3 * request.most * (request.slots or 8) + FILES_BESIDE_PEERS
    if files != resource.RLIM_INFINITY and files < needed:
        yield warning(
            "open-files",
            f"a process can have only {files} open files; about {needed} are needed for this number of workers "
            'and data loaders ("Too many open files")',
            "raise the limit: ulimit -n, in a service LimitNOFILE",
        )
    space = limit_of(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        yield warning(
            "address-space",
            f"a process can have only {size(space)} of address space; torch and its threads use more of it than of "
            "memory",
            UNLIMITED,
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
        if folder == Path(os.devnull):  # --log-dir: nothing is kept
            continue
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


# -- variables ------------------------------------------------------------------------------------


def check_gloo_interface(
    environ: Mapping[str, str], interfaces: Collection[str], suggested: str | None
) -> Iterator[Finding]:
    """Check that ``GLOO_SOCKET_IFNAME`` names an interface at which other machines reach this one.

    Args:
        environ: the environment.
        interfaces: this machine's.
        suggested: the interface of the route to the other machines, if it is known.
    """
    gloo = environ.get("GLOO_SOCKET_IFNAME")
    if gloo is None:
        return
    if gloo not in interfaces and (gloo[:1] in ("^", "=") or "," in gloo):
        cause = (
            "is a list as NCCL takes it; gloo takes the name of one interface, and ends with "
            '"Unable to find address for"'
        )
    elif gloo not in interfaces:
        cause = f"names no interface of this machine (it has {_listed(interfaces)})"
    elif suggested not in (None, gloo) and gloo.startswith(_LOCAL_BRIDGES):
        cause = (
            "is an interface for containers or virtual machines of this machine; the route to the other machines "
            f"is over {suggested}"
        )
    else:
        return
    yield error(
        "gloo-interface",
        f"GLOO_SOCKET_IFNAME={gloo} {cause}",
        f"set GLOO_SOCKET_IFNAME{_value(suggested)}, or unset it: elastic-agent then sets the right one",
    )


def check_nccl_interface(
    environ: Mapping[str, str], interfaces: Collection[str], suggested: str | None, *, has_gpus: bool
) -> Iterator[Finding]:
    """Check that ``NCCL_SOCKET_IFNAME`` matches an interface; arguments as for :func:`check_gloo_interface`.

    Its value is a list of prefixes; of whole names after ``=``, and of exceptions, which are not checked, after ``^``.
    """
    nccl = environ.get("NCCL_SOCKET_IFNAME", "")
    names = tuple(name for name in nccl.removeprefix("=").split(",") if name)
    is_exact = nccl.startswith("=")
    if not nccl or nccl.startswith("^"):
        return
    if not any(interface in names if is_exact else interface.startswith(names) for interface in interfaces):
        make = error if has_gpus else warning
        yield make(
            "nccl-interface",
            f"NCCL_SOCKET_IFNAME={nccl} matches no interface of this machine (it has {_listed(interfaces)}); NCCL "
            'ends with "no socket interface found"',
            f"set NCCL_SOCKET_IFNAME{_value(suggested)}",
        )


def _listed(interfaces: Collection[str]) -> str:
    return ", ".join(sorted(interfaces)) or "none"


def _value(suggested: str | None) -> str:
    return f"={suggested}" if suggested else " to one of them"
