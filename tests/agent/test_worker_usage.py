"""The resources that workers take of the machine, as their node reports them."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_agent.agent.reporting.worker_usage import WorkerUsage
from elastic_agent.linux import cpu_time_s
from tests.waiting import wait_for

BUSY = "x = bytearray(64 * 2**20)\nwhile True: pass"


def test_processor_time_and_memory_are_those_of_the_worker() -> None:
    usage = WorkerUsage()
    with subprocess.Popen([sys.executable, "-c", BUSY]) as busy:
        try:
            usage.look({0: busy.pid}, 100.0)
            assert usage.by_slot[0].cpu is None, "two looks are needed"
            before_s = cpu_time_s(busy.pid)
            wait_for("processor time", lambda: cpu_time_s(busy.pid) > before_s + 0.2)
            usage.look({0: busy.pid}, 100.1)
        finally:
            busy.kill()
    cpu, memory = usage.by_slot[0].cpu, usage.by_slot[0].memory_bytes
    assert cpu is not None
    assert cpu >= 2.0, "0.2 s in 0.1 s by the clock that was given"
    assert memory is not None
    assert memory > 64 * 2**20
    usage.look({0: busy.pid}, 200.0)
    assert usage.by_slot == {}, "it has ended"


class Driver:
    """Two GPUs as NVML shows them, of which one cannot tell how busy it is; for a process on both."""

    NVMLError = ValueError

    def __init__(self, pid: int) -> None:
        self._process = SimpleNamespace(pid=pid, usedGpuMemory=2**30)

    def __getattr__(self, name: str) -> Any:
        def busy(number: int) -> SimpleNamespace:
            if number == 1:
                raise ValueError("Not Supported")
            return SimpleNamespace(gpu=40)

        answers: dict[str, Any] = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda number: number,
            "nvmlDeviceGetUtilizationRates": busy,
            "nvmlDeviceGetComputeRunningProcesses": lambda number: [self._process],
        }
        return answers[name]


def test_a_worker_is_shown_with_its_share_of_the_gpus() -> None:
    usage = WorkerUsage(Driver(os.getpid()), driver="/dev/null")

    def looked() -> bool:
        usage.look({0: os.getpid()}, 100.0)
        return usage.by_slot[0].gpu is not None

    wait_for("the driver's answer", looked)
    assert (usage.by_slot[0].gpu, usage.by_slot[0].gpu_memory_bytes) == (0.4, 2**31)


@pytest.mark.parametrize("nvml", [object(), None], ids=["a driver that fails", "no library"])
def test_without_an_answer_of_the_driver_the_rest_is_shown(
    nvml: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    usage = WorkerUsage(nvml, driver="/dev/null")
    for now_s in (100.0, 105.0):
        usage.look({0: os.getpid()}, now_s)
    assert (usage.by_slot[0].gpu, usage.by_slot[0].gpu_memory_bytes) == (None, None)
    assert usage.by_slot[0].memory_bytes
