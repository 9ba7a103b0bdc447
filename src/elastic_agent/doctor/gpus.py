"""The GPUs of this machine, as the driver (NVML) reports them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from elastic_agent.agent.preflight import Finding, error, warning
from elastic_agent.linux import process_name

_DRIVER = "/dev/nvidiactl"
_BUSY_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a machine, as far as they are known."""

    names: tuple[str, ...] = ()
    driver: str = ""
    holders: tuple[str, ...] = ()
    """Processes with memory on a GPU, as "GPU 0: python (pid 4711)"."""
    problem: str = ""
    """The first error of NVML, word for word."""
    lacks_library: bool = False
    """There is a driver, and no library to ask it."""

    @property
    def described(self) -> str:
        """Return such as "8 x NVIDIA H100"."""
        kinds = dict.fromkeys(self.names)
        return ", ".join(f"{self.names.count(kind)} x {kind}" for kind in kinds) or "none"


def find_gpus(nvml: Any = None, driver: str = _DRIVER) -> Gpus:
    """Ask the driver; there are no GPUs where there is none.

    Args:
        nvml: the library; None: ``pynvml``, if it is installed.
        driver: a file that is there if a driver is.
    """
    if not os.path.exists(driver):
        return Gpus()
    try:
        nvml = nvml or importlib.import_module("pynvml")
    except ImportError:
        return Gpus(lacks_library=True)
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
        names = tuple(_text(nvml.nvmlDeviceGetName(handle)) for handle in handles)
        version = _text(nvml.nvmlSystemGetDriverVersion())
        return Gpus(names, version, tuple(_holders(nvml, handles)))
    except Exception as failure:  # the library's own kind, known only when it is there
        return Gpus(problem=str(failure))


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _holders(nvml: Any, handles: Collection[Any]) -> Iterator[str]:
    for number, handle in enumerate(handles):
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if (process.usedGpuMemory or 0) > _BUSY_BYTES:
                yield f"GPU {number}: {process_name(int(process.pid)) or 'a process'} (pid {process.pid})"


def check_gpus(gpus: Gpus, slots: int | None, shown: str | None) -> Iterator[Finding]:
    """Check that the driver works, the GPUs are free, and there is one for each worker.

    Args:
        gpus: of this machine.
        slots: workers; None: one for each GPU.
        shown: the value of CUDA_VISIBLE_DEVICES.
    """
    if gpus.lacks_library:
        yield warning(
            "gpus",
            "the GPUs of this machine were not examined: the package nvidia-ml-py is not installed",
            "pip install nvidia-ml-py",
        )
    elif gpus.problem:
        yield error(
            "gpus",
            f"the NVIDIA driver reports: {gpus.problem}",
            'run nvidia-smi; after an update of the driver ("Driver/library version mismatch") reboot the machine',
        )
    if gpus.holders:
        yield warning(
            "gpus-in-use",
            f"memory of GPUs is in use by {', '.join(gpus.holders[:8])}",
            "end these processes, if they were left behind by an earlier job",
        )
    visible = _visible(len(gpus.names), shown)
    if gpus.names and slots is not None and slots > visible:
        yield error(
            "workers-per-gpu",
            f"{slots} workers for {visible} visible GPUs: workers share a GPU "
            '("Duplicate GPU detected") or get none ("invalid device ordinal")',
            "reduce --nproc-per-node, or check CUDA_VISIBLE_DEVICES",
        )


def _visible(count: int, variable: str | None) -> int:
    if variable is None:
        return count
    return min(count, len([entry for entry in variable.split(",") if entry.strip() not in ("", "-1")]))
