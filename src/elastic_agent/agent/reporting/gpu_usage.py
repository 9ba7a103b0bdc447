"""Asks NVIDIA's driver what processes take of the GPUs, in threads: a driver that has failed may not answer."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from typing import Any, NamedTuple

DRIVER = "/dev/nvidiactl"


class GpuShare(NamedTuple):
    """What a process has of the GPUs on which it runs."""

    busy: float | None
    """How busy they are, from 0 to 1, whoever uses them; None: the driver does not tell."""
    memory_bytes: int


class GpuUsage:
    """The newest answer of the driver, if there is one and ``nvidia-ml-py`` is installed."""

    def __init__(self, nvml: Any = None, driver: str = DRIVER) -> None:
        """Ask nothing yet.

        Args:
            nvml: the library; None: ``pynvml``.
            driver: a file that is there if a driver is.
        """
        self.by_pid: dict[int, GpuShare] = {}
        self._nvml = nvml
        self._may_ask = os.path.exists(driver)

    def ask(self) -> None:
        """Begin to ask, unless an answer is awaited, or the driver could not be asked before."""
        if self._may_ask:
            self._may_ask = False
            threading.Thread(target=self._ask, name="gpu-usage", daemon=True).start()

    def _ask(self) -> None:
        try:
            if self._nvml is None:
                self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self.by_pid = self._look(self._nvml)
            self._may_ask = True
        except Exception:  # the library is not there, or raises its own kind
            self.by_pid = {}

    def _look(self, nvml: Any) -> dict[int, GpuShare]:
        found: dict[int, GpuShare] = {}
        for number in range(nvml.nvmlDeviceGetCount()):
            gpu, busy = nvml.nvmlDeviceGetHandleByIndex(number), None
            with contextlib.suppress(nvml.NVMLError):  # parts of a GPU (MIG) have none
                busy = nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu):
                other = found.get(process.pid, GpuShare(None, 0))
                busiest = max((share for share in (busy, other.busy) if share is not None), default=None)
                found[process.pid] = GpuShare(busiest, other.memory_bytes + (process.usedGpuMemory or 0))
        return found
