"""The number of workers that ``--nproc-per-node`` means here, and the limit of open files that they need."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from elastic_agent import linux
from elastic_agent.config.errors import UsageError
from elastic_agent.diagnosis.known_errors import ending
from elastic_agent.printable import plain

AGENT_FILES, FILES_PER_WORKER = 80, 8
"""Descriptors that an agent opens at most, and more for each worker, in it or in its guard (measured)."""

IMPORT_PATIENCE_S = 5.0
"""A shorter import of torch is not reported."""

_COUNT = """
import os, signal
from elastic_agent import linux
linux.set_parent_death_signal(signal.SIGKILL)
import torch
print(*(kind.device_count() if kind.is_available() else 0 for kind in (torch.cuda, torch.xpu)), flush=True)
os._exit(0)
"""
"""Prints torch's numbers. It ends without Python's clean-up, which drivers may crash."""


def count_slots(wanted: str) -> int:
    """Return the number of workers for a value that config has validated.

    Raises:
        UsageError: the machine has none of the requested devices.
    """
    if (fixed := _without_devices(wanted)) is not None:
        return fixed
    found = _accelerators()
    if wanted == "xpu":
        return _at_least_one(found.xpus, wanted, "Intel GPU")
    if wanted == "gpu":
        return _at_least_one(found.gpus, wanted, "GPU")
    if wanted == "auto":
        return found.gpus or found.xpus or _cpus()
    return found.gpus or 1


def likely_slots(wanted: str) -> int | None:
    """Return the same without asking torch; None if that is necessary."""
    if wanted in ("gpu-or-1", "auto") and not _has_device_files():
        return count_slots(wanted)
    return _without_devices(wanted)


def _without_devices(wanted: str) -> int | None:
    if wanted.isdigit():
        return int(wanted)
    return _cpus() if wanted == "cpu" else None


def _cpus() -> int:
    """Return how many CPUs this process may use, which may be some of the machine's only, as in a Slurm step."""
    return len(os.sched_getaffinity(0))


class _Accelerators(NamedTuple):
    """The devices of each kind that torch may use here, by its own rules (CUDA_VISIBLE_DEVICES, MIG, ROCm)."""

    gpus: int
    xpus: int


def _has_device_files() -> bool:
    """Return whether a device may be there: no driver works without its files."""
    try:
        return any(name.startswith(linux.DEVICE_FILES) for name in os.listdir("/dev"))
    except OSError:  # not readable, which does not keep programs from opening what is in it
        return True


@cache
def _accelerators() -> _Accelerators:
    """Ask torch, where a device may be, in a process of its own: torch takes memory, and its drivers threads.

    Raises:
        UsageError: torch cannot be imported, or crashes.
    """
    if not _has_device_files():
        return _Accelerators(0, 0)
    with linux.signals_blocked():  # those that reach all processes of a job are for the agent
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _COUNT],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
    from elastic_agent.logs import get_logger  # late, too

    with process:
        tick = telling_of_import()
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    printed, complaints = process.communicate(timeout=1.0)
                    break
                tick()
        except BaseException:  # Ctrl-C
            process.kill()
            raise
    if complaints.strip():
        get_logger().warning(complaints.strip())
    counts = printed.split()[-2:]
    if process.returncode == 0 and len(counts) == 2:
        return _Accelerators(int(counts[0]), int(counts[1]))
    last = complaints.strip().splitlines()[-1:]
    raise UsageError(
        f"torch cannot count the GPUs of this machine: the process that asked it {ending(process.returncode)}"
        f"{f' ({plain(last[0]).strip()})' if last else ''}",
        f"expected that {sys.executable} can import torch and use the GPUs; repair that, or give --nproc-per-node a "
        "number and leave out --numa-binding",
    )


def telling_of_import() -> Callable[[], None]:
    """Return what is to be called about once a second while another process imports torch."""
    from elastic_agent.logs import WaitingReporter, get_logger  # late: the guard is to be started before

    reporter = WaitingReporter(get_logger().info)
    began_s = time.monotonic()

    def tick() -> None:
        waited_s = time.monotonic() - began_s
        if waited_s >= IMPORT_PATIENCE_S:
            slow = "the first time on a machine, or from a file server, it may take minutes"
            reporter.update(f"importing torch with {sys.executable}: {slow}", already_s=waited_s)

    return tick


def check_numa_binding(wanted: str | None) -> None:
    """Check that there is a GPU to bind workers to, beside whose processors torch binds them.

    Raises:
        UsageError: this machine has no GPU to bind workers to.
    """
    if wanted is not None and not _accelerators().gpus:
        raise UsageError(
            f"--numa-binding {wanted}: torch finds no GPU on this machine",
            "expected one, because each worker is bound to the CPUs near its GPU; remove --numa-binding",
        )


def _at_least_one(count: int, wanted: str, device: str) -> int:
    if count:
        return count
    raise UsageError(
        f"--nproc-per-node {wanted}: torch finds no {device} on this machine",
        "give a number, or cpu for one worker per CPU",
    )


def check_open_files(slots: int) -> None:
    """Check that an agent and so many workers have enough descriptors (0: the store alone).

    With fewer, the agent would hang, or end with an error that does not name the cause.

    Raises:
        UsageError: they have not.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = AGENT_FILES + FILES_PER_WORKER * slots
    if limit != resource.RLIM_INFINITY and limit < wanted:
        needed_for = f" for {slots} worker{'s' if slots > 1 else ''}" if slots else ""
        raise UsageError(
            f"a process of this user can have only {limit} open files",
            f"expected at least {wanted}{needed_for}: raise the limit (ulimit -n; in a service LimitNOFILE)",
        )
