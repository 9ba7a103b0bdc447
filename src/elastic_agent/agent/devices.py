"""How many workers ``--nproc-per-node`` means on this machine."""

from __future__ import annotations

import contextlib
import os

from elastic_agent.config.errors import UsageError

_MOST_PER_CPU = 4
"""More workers per CPU are taken for a mistake; fewer are usual in tests."""


def count_slots(wanted: str) -> int:
    """The number of workers for a value that config has validated.

    Raises:
        UsageError: the machine has none of the requested devices.
    """
    if (fixed := _without_devices(wanted)) is not None:
        return fixed
    if wanted == "xpu":
        return _at_least_one(_xpus(), wanted, "Intel GPU")
    gpus = _gpus()
    if wanted == "gpu":
        return _at_least_one(gpus, wanted, "GPU")
    if wanted == "auto":
        return gpus or _xpus() or _cpus()
    return gpus or 1


def likely_slots(wanted: str) -> int | None:
    """The same without importing torch; None if that requires torch."""
    if wanted == "gpu-or-1" and not _has_device_files():
        return 1
    return _without_devices(wanted)


def _without_devices(wanted: str) -> int | None:
    if wanted.isdigit():
        return int(wanted)
    return _cpus() if wanted == "cpu" else None


def crowding(slots: int) -> str | None:
    """Return a warning if so many workers have far too few CPUs."""
    cpus = _cpus()
    if slots <= _MOST_PER_CPU * cpus:
        return None
    return (
        f"{slots} workers share {cpus} CPU{'s' if cpus > 1 else ''}; expected one or more CPUs per worker: lower "
        "--nproc-per-node, or let the agent use more CPUs (taskset, Slurm's --cpus-per-task, the container's cpuset)"
    )


def _cpus() -> int:
    """Return how many CPUs this process may use, which may be some of the machine's only, as in a Slurm step."""
    return len(os.sched_getaffinity(0))


def _has_device_files() -> bool:
    with contextlib.suppress(OSError):
        return any(name.startswith(("nvidia", "kfd", "dri", "accel")) for name in os.listdir("/dev"))
    return False


def check_numa_binding(wanted: str | None) -> None:
    """torch binds each worker to the processors beside its GPU, and ends with an assertion where there is none.

    Raises:
        UsageError: this machine has no GPU to bind workers to.
    """
    if wanted is not None and not _gpus():
        raise UsageError(
            f"--numa-binding {wanted}: torch finds no GPU on this machine; expected one, because each "
            "worker is bound to the CPUs near its GPU; remove --numa-binding"
        )


def _gpus() -> int:
    import torch  # late: it takes a second

    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def _xpus() -> int:
    import torch

    return int(torch.xpu.device_count()) if torch.xpu.is_available() else 0


def _at_least_one(count: int, wanted: str, what: str) -> int:
    if count:
        return count
    raise UsageError(
        f"--nproc-per-node {wanted}: torch finds no {what} on this machine; give a number, or cpu for "
        "one worker per CPU"
    )
