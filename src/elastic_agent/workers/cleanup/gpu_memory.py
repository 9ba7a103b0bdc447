"""Who has memory on this machine's NVIDIA GPUs, as the driver (NVML) lists it.

A worker's GPU memory is free when its process has ended, except for processes that are stuck in the kernel and
for those that passed their memory on. The next generation would fail with "out of memory", and say nothing of
the reason.

Needs `nvidia-ml-py` (the extra `gpu`); without it, or without a driver, nothing is asked and nobody waits. In a
container the driver may list numbers of processes that mean nothing there: then none is found.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from elastic_agent.linux import process_name

__all__ = ["GpuHolder", "GpuMemory"]

_DRIVER = "/dev/nvidiactl"
_LOOK_EVERY_S = 0.05  # the driver tells nobody when memory is freed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GpuHolder:
    """A process that has memory on a GPU."""

    gpu: int
    pid: int
    process: str


class GpuMemory:
    """The GPUs of this machine. Blocks while it asks the driver; belongs to one thread.

    Args:
        nvml: The library; None: it is loaded when it is first needed, if it is installed.
        driver: A file that is there if a driver is.
    """

    def __init__(self, nvml: Any = None, driver: str = _DRIVER) -> None:
        self._nvml = nvml
        self._driver = driver
        self._gpus: list[Any] | None = None

    @property
    def there(self) -> bool:
        """Whether there may be GPUs to ask about."""
        return self._gpus != [] and os.path.exists(self._driver)

    def prepare(self) -> None:
        """Connect to the driver, which may take a second or more where nobody else is."""
        if self._gpus is not None or not self.there:
            return
        self._gpus = []
        try:
            nvml = self._nvml = self._nvml or importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._gpus = [
                nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())
            ]
        except ImportError:
            pass  # not wanted: it is an extra
        except Exception as error:  # the library's own kind, known only when it is there
            logger.debug("GPU memory is not checked: %s", error)

    def holders(self, pids: Collection[int]) -> list[GpuHolder]:
        """Those of these processes that have memory on a GPU."""
        self.prepare()
        found = []
        for number, gpu in enumerate(self._gpus or ()):
            try:
                running = {int(one.pid) for one in self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
            except Exception as error:  # a GPU that is lost, or does not tell
                logger.debug("GPU %d does not report its processes: %s", number, error)
                continue
            found += [GpuHolder(number, pid, process_name(pid)) for pid in sorted(running & {*pids})]
        return found

    def await_release(self, pids: Collection[int], timeout_s: float) -> list[GpuHolder]:
        """Wait until none of these has memory on a GPU; those that still have after `timeout_s`."""
        ends_s = time.monotonic() + timeout_s
        pause = threading.Event()
        while (found := self.holders(pids)) and time.monotonic() < ends_s:
            pause.wait(_LOOK_EVERY_S)
        return found
