"""The processes with memory on this machine's NVIDIA GPUs, as listed by the driver (NVML).

A worker's GPU memory is free when its process has ended, except for processes that are stuck in the kernel and
for those that passed their memory on. The next generation would fail with "out of memory", without the reason.

Needs `nvidia-ml-py` (the extra `gpu`); without it, or without a driver, there is no check and no wait. In a
container the driver may list process numbers of another namespace: then none is found.
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

_DRIVER = "/dev/nvidiactl"
_LOOK_EVERY_S = 0.05  # the driver has no event for freed memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GpuHolder:
    """A process that has memory on a GPU."""

    gpu: int
    pid: int
    process: str


class GpuMemory:
    """The GPUs of this machine. Blocks while it queries the driver; belongs to one thread.

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
        """Whether there may be GPUs."""
        return self._gpus != [] and os.path.exists(self._driver)

    def prepare(self) -> None:
        """Connect to the driver, which may take a second or more if no other process is connected."""
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
            except Exception as error:  # a GPU that is lost, or does not report them
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
