"""Checks this machine: limits, shared memory, folders, variables that name interfaces."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from elastic_agent.agent.preflight import Finding, error, warning
from elastic_agent.config.directories import problem_with_folder
from elastic_agent.printable import size_text
from elastic_agent.transport import (
    StoreLostError,
    UnreachableError,
    interface_of,
    resolve,
    run_abandonable,
    source_towards,
)

T = TypeVar("T")

_LOCAL_BRIDGES = ("docker", "virbr", "br-", "veth", "cni", "lo")
"""Beginnings of names of interfaces that no other machine reaches."""
LEAST_FREE = 2**28
"""Bytes that a folder for logs and state should have free."""
LEAST_SHM = 512 * 2**20
"""Bytes of /dev/shm: data loaders and NCCL pass their data through it; Docker's default of 64 MiB is not enough."""
ETCD_S = 5.0
UNLIMITED = "ulimit -v unlimited; in a service LimitAS=infinity"
FILES_BESIDE_PEERS = 256
"""Descriptors of a worker besides three for each other worker: libraries, data loaders, logs."""


async def in_time(work: Callable[[], T], limit_s: float, otherwise: T) -> T:
    """Call it in a thread, which is abandoned if storage, a name server or a driver does not answer."""
    try:
        return await run_abandonable(work, limit_s)
    except StoreLostError:
        return otherwise


def soft_limit(which: int) -> int:
    """Return a soft limit of this process."""
    return resource.getrlimit(which)[0]


def check_limits(workers: int, limit_of: Callable[[int], int] = soft_limit) -> Iterator[Finding]:
    """Check the limits of open files and address space. ``workers``: of the run."""
    files = limit_of(resource.RLIMIT_NOFILE)
    needed = 3 * workers + FILES_BESIDE_PEERS
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
            f"a process can have only {size_text(space)} of address space; torch and its threads use more of it "
            "than of memory",
            UNLIMITED,
        )


def etcd_version() -> str:
    """Return the version of the installed etcd; empty: there is none, or it does not tell."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(
            ["etcd", "--version"], capture_output=True, text=True, timeout=ETCD_S, check=True
        )
        return told.stdout.partition("etcd Version: ")[2].partition("\n")[0]
    return ""


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
            f"{folder} has {size_text(usage.free)} free of {size_text(usage.total)}; data loaders with workers, and "
            'NCCL, fail when it is full ("Bus error", "No space left on device")',
            "enlarge it: docker run --shm-size=8g, in Kubernetes an emptyDir with medium Memory, else mount -o "
            "remount,size=8G; or remove old files from it",
        )


def check_folders(folders: Mapping[str, Path]) -> Iterator[Finding]:
    """Check that the agent's own folders, by their options, are writable and have space."""
    for option, folder in folders.items():
        if folder == Path(os.devnull):  # --log-dir: nothing is kept
            continue
        if problem := problem_with_folder(folder):
            cause = f"{option} {folder} cannot be written, {problem}"
            yield error("folder", cause, f"make it writable, or set another folder with {option}")
            continue
        free = shutil.disk_usage(next(filter(os.path.isdir, (folder, *folder.parents)))).free
        if free < LEAST_FREE:
            yield warning(
                "disk-space",
                f"{option} {folder} has only {size_text(free)} free",
                f"free some space, or set another folder with {option}",
            )


# -- interfaces -----------------------------------------------------------------------------------


def route_interface(host: str) -> str | None:
    """Return the interface of the route to a host; None: there is no route, or it is this machine itself."""
    with contextlib.suppress(UnreachableError, OSError):
        for family, address in resolve(host):
            return interface_of(source_towards(family, address))
    return None


def check_interfaces(
    environ: Mapping[str, str], interfaces: Collection[str], suggested: str | None, *, has_gpus: bool
) -> Iterator[Finding]:
    """Check the variables that name interfaces.

    Args:
        environ: the environment.
        interfaces: this machine's.
        suggested: the interface of the route to the other machines, if it is known.
        has_gpus: NCCL will be used.
    """
    here = f"(it has {', '.join(sorted(interfaces)) or 'none'})"
    value = f"={suggested}" if suggested else " to one of them"
    if problem := _gloo_problem(environ.get("GLOO_SOCKET_IFNAME"), interfaces, suggested, here):
        yield error(
            "gloo-interface",
            f"GLOO_SOCKET_IFNAME={problem}",
            f"set GLOO_SOCKET_IFNAME{value}, or unset it: elastic-agent then sets the right one",
        )
    nccl = environ.get("NCCL_SOCKET_IFNAME", "")
    # A list of prefixes; of whole names after =, and of exceptions, which are not checked, after ^.
    names = tuple(name for name in nccl.removeprefix("=").split(",") if name)
    is_exact = nccl.startswith("=")
    if not nccl or nccl.startswith("^"):
        return
    if not any(interface in names if is_exact else interface.startswith(names) for interface in interfaces):
        make = error if has_gpus else warning
        yield make(
            "nccl-interface",
            f"NCCL_SOCKET_IFNAME={nccl} matches no interface of this machine {here}; NCCL "
            'ends with "no socket interface found"',
            f"set NCCL_SOCKET_IFNAME{value}",
        )


def _gloo_problem(gloo: str | None, interfaces: Collection[str], suggested: str | None, here: str) -> str:
    """Return the value of GLOO_SOCKET_IFNAME with what is wrong with it; empty: nothing."""
    if gloo is None:
        return ""
    if gloo not in interfaces and (gloo[:1] in ("^", "=") or "," in gloo):
        return (
            f"{gloo} is a list as NCCL takes it; gloo takes the name of one interface, and ends with "
            '"Unable to find address for"'
        )
    if gloo not in interfaces:
        return f"{gloo} names no interface of this machine {here}"
    if suggested not in (None, gloo) and gloo.startswith(_LOCAL_BRIDGES):
        return (
            f"{gloo} is an interface for containers or virtual machines of this machine; the route to the other "
            f"machines is over {suggested}"
        )
    return ""
