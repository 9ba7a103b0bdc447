"""Reads what the processes of workers take of their machine: from /proc, and of GPUs from NVIDIA's driver.

The driver is asked in threads: one that has failed may not answer.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from elastic_agent.diagnosis.records import Usage
from elastic_agent.linux import cpu_time_s, resident_bytes

DRIVER = "/dev/nvidiactl"


class _GpuShare(NamedTuple):
    """A process's share of the GPUs on which it runs."""

    busy: float | None
    """Their utilisation, from 0 to 1, whoever uses them; None: the driver does not tell."""
    memory_bytes: int


class WorkerUsage:
    """The resources that the workers' processes take; a look takes some microseconds for each."""

    def __init__(self, nvml: Any = None, driver: str = DRIVER) -> None:
        """Ask nothing yet.

        Args:
            nvml: the library; None: ``pynvml``, of the package ``nvidia-ml-py``, if it is installed.
            driver: a file that is there if a driver is.
        """
        self.by_slot: dict[int, Usage] = {}
        self._seen: dict[int, tuple[float, float]] = {}
        """When each process was looked at last, and the processor time that it had used."""
        self._gpus: dict[int, _GpuShare] = {}
        """The newest answer of the driver, by process."""
        self._nvml = nvml
        self._may_ask = os.path.exists(driver)
        """No answer of the driver is awaited, and it could be asked before."""

    def look(self, pids: Mapping[int, int], now_s: float) -> None:
        """Look at these processes, by slot; ``now_s``: by a clock that does not jump."""
        before, self._seen, self.by_slot = self._seen, {}, {}
        if self._may_ask:  # the answer is used at the next look
            self._may_ask = False
            threading.Thread(target=self._ask_driver, name="gpu-usage", daemon=True).start()
        for slot, pid in pids.items():
            with contextlib.suppress(OSError):  # it has ended
                used_s, memory = cpu_time_s(pid), resident_bytes(pid)
                at_s, before_s = before.get(pid, (now_s, used_s))
                cpu = max(0.0, used_s - before_s) / (now_s - at_s) if now_s > at_s else None
                gpu = self._gpus.get(pid, _GpuShare(None, 0))
                self.by_slot[slot] = Usage(cpu, memory, gpu.busy, gpu.memory_bytes or None)
                self._seen[pid] = now_s, used_s

    def _ask_driver(self) -> None:
        try:
            if self._nvml is None:
                self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._gpus = _shares(self._nvml)
            self._may_ask = True
        except Exception:  # the library is not there, or raises its own kind
            self._gpus = {}


def _shares(nvml: Any) -> dict[int, _GpuShare]:
    found: dict[int, _GpuShare] = {}
    for number in range(nvml.nvmlDeviceGetCount()):
        gpu, busy = nvml.nvmlDeviceGetHandleByIndex(number), None
        with contextlib.suppress(nvml.NVMLError):  # parts of a GPU (MIG) have none
            busy = nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu):
            other = found.get(process.pid, _GpuShare(None, 0))
            busiest = max((share for share in (busy, other.busy) if share is not None), default=None)
            found[process.pid] = _GpuShare(busiest, other.memory_bytes + (process.usedGpuMemory or 0))
    return found
