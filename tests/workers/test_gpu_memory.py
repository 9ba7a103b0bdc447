"""Waiting for GPU memory, against what the driver's library says."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_agent.workers.cleanup import gpu_memory
from elastic_agent.workers.cleanup.gpu_memory import GpuHolder, GpuMemory
from tests.processes import name_of
from tests.waiting import GUARD_S

ME = os.getpid()
NAME = name_of(ME)


class Driver:
    """NVML as far as it is used: lists of processes by GPU, one after the other, the last one for ever."""

    def __init__(self, *listings: dict[int, list[int]]) -> None:
        self.listings = [*listings]
        self.asked = 0

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's name
        pass

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 - NVML's name
        return len(self.listings[0])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802 - NVML's name
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: int) -> list[Any]:  # noqa: N802 - NVML's name
        listing = self.listings[min(self.asked // len(self.listings[0]), len(self.listings) - 1)]
        self.asked += 1
        return [SimpleNamespace(pid=pid) for pid in listing[gpu]]


@pytest.fixture
def memory(tmp_path: Path) -> Callable[[Any], GpuMemory]:
    """Makes them for a machine that has a driver."""
    (tmp_path / "nvidiactl").touch()
    return lambda nvml: GpuMemory(nvml, str(tmp_path / "nvidiactl"))


def test_it_waits_until_the_workers_memory_is_free(memory: Callable[[Any], GpuMemory]) -> None:
    driver = Driver({0: [7, ME], 1: [ME]}, {0: [7, ME], 1: []}, {0: [7], 1: []})
    assert memory(driver).await_release({ME}, GUARD_S) == []
    assert driver.asked == 6


def test_processes_that_keep_gpu_memory_are_named(memory: Callable[[Any], GpuMemory]) -> None:
    driver = Driver({0: [7], 1: [ME, 7]})
    assert memory(driver).await_release({ME}, 0.06) == [GpuHolder(1, ME, NAME)]


def test_gpu_memory_of_other_processes_is_ignored(memory: Callable[[Any], GpuMemory]) -> None:
    driver = Driver({0: [7]})
    assert memory(driver).await_release({ME}, GUARD_S) == []
    assert driver.asked == 1


def test_a_lost_gpu_does_not_delay_the_cleanup(memory: Callable[[Any], GpuMemory]) -> None:
    class Lost(Driver):
        def nvmlDeviceGetComputeRunningProcesses(self, gpu: int) -> list[Any]:  # noqa: N802
            raise RuntimeError("GPU is lost")

    assert memory(Lost({0: [ME]})).await_release({ME}, GUARD_S) == []


def test_without_a_driver_nothing_is_loaded_or_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Untouchable:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was looked for")

    with caplog.at_level(logging.DEBUG):
        gpus = GpuMemory(Untouchable(), str(tmp_path / "none"))
        gpus.prepare()
        assert not gpus.there
        assert gpus.await_release({ME}, GUARD_S) == []
    assert not [record for record in caplog.records if record.name == gpu_memory.__name__]


def test_an_unresponsive_driver_is_not_queried_again(memory: Callable[[Any], GpuMemory]) -> None:
    class Broken(Driver):
        def nvmlInit(self) -> None:  # noqa: N802
            self.asked += 1
            raise RuntimeError("driver/library version mismatch")

    driver = Broken({0: [ME]})
    gpus = memory(driver)
    for _ in range(2):
        assert gpus.await_release({ME}, GUARD_S) == []
    assert driver.asked == 1
    assert not gpus.there


@pytest.mark.prove
def test_the_nvml_library_has_the_expected_names() -> None:
    nvml = pytest.importorskip("pynvml", reason="nvidia-ml-py (the extra gpu) is not installed")
    assert all(callable(getattr(nvml, name)) for name in vars(Driver) if name.startswith("nvml"))
