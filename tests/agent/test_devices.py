"""What the words of ``--nproc-per-node`` mean on machines with other numbers of CPUs and GPUs than this one."""

from __future__ import annotations

import os

import pytest

from elastic_agent.agent import devices
from elastic_agent.config.errors import UsageError


@pytest.mark.parametrize(
    ("gpus", "wanted", "workers"),
    [
        (0, "auto", 3),
        (0, "cpu", 3),
        (0, "gpu-or-1", 1),
        (4, "auto", 4),
        (4, "cpu", 3),
        (4, "gpu", 4),
        (4, "gpu-or-1", 4),
        (4, "2", 2),
    ],
)
def test_there_is_one_worker_per_device(
    monkeypatch: pytest.MonkeyPatch, gpus: int, wanted: str, workers: int
) -> None:
    """The machine has three CPUs that this process may use."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 6})
    monkeypatch.setattr(devices, "_gpus", lambda: gpus)
    monkeypatch.setattr(devices, "_xpus", lambda: 0)
    assert devices.count_slots(wanted) == workers


@pytest.mark.parametrize(("wanted", "device"), [("gpu", "no GPU"), ("xpu", "no Intel GPU")])
def test_a_machine_without_the_device_is_an_error(
    monkeypatch: pytest.MonkeyPatch, wanted: str, device: str
) -> None:
    monkeypatch.setattr(devices, "_gpus", lambda: 0)
    monkeypatch.setattr(devices, "_xpus", lambda: 0)
    with pytest.raises(UsageError, match=f"{wanted}: torch finds {device} on this machine; give a number"):
        devices.count_slots(wanted)
