"""What the words of ``--nproc-per-node`` mean on machines with other numbers of CPUs and GPUs than this one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_agent.agent import devices
from elastic_agent.config.errors import UsageError

TORCH = """
class Kind:
    def __init__(self, count):
        self.device_count, self.is_available = (lambda: count), (lambda: count > 0)

cuda, xpu = Kind({gpus}), Kind({xpus})
"""

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    """Makes this a machine with three CPUs that this process may use, these files in /dev, and another torch."""

    def become(*files: str, gpus: int = 0, xpus: int = 0, torch: str = TORCH) -> None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text(
            torch.replace("{gpus}", str(gpus)).replace("{xpus}", str(xpus))
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 6})
        monkeypatch.setattr(os, "listdir", lambda _: ["null", "tty", "nvme0", *files])

    devices._accelerators.cache_clear()
    yield become
    devices._accelerators.cache_clear()


@pytest.mark.parametrize(
    ("gpus", "xpus", "wanted", "workers"),
    [
        (0, 0, "auto", 3),
        (0, 0, "cpu", 3),
        (0, 0, "gpu-or-1", 1),
        (4, 0, "auto", 4),
        (4, 0, "cpu", 3),
        (4, 0, "gpu", 4),
        (4, 0, "gpu-or-1", 4),
        (4, 0, "2", 2),
        (0, 5, "auto", 5),
        (0, 5, "xpu", 5),
        (0, 5, "gpu-or-1", 1),
    ],
)
def test_there_is_one_worker_per_device(
    machine: Machine, gpus: int, xpus: int, wanted: str, workers: int
) -> None:
    """As torch counts them. Whether some file in /dev is of a device that torch can use is not known before."""
    machine("dri", gpus=gpus, xpus=xpus)
    assert devices.likely_slots(wanted) in (workers, None)
    assert devices.count_slots(wanted) == workers


def test_torch_is_not_asked_where_there_is_none(machine: Machine) -> None:
    machine(torch="raise SystemExit('imported')")
    for wanted, workers in {"auto": 3, "gpu-or-1": 1, "cpu": 3}.items():
        assert devices.likely_slots(wanted) == devices.count_slots(wanted) == workers


def test_workers_can_be_bound_where_there_is_a_gpu(machine: Machine) -> None:
    machine("nvidia0", gpus=1)
    devices.check_numa_binding("node")


def test_what_torch_says_when_it_is_asked_is_shown(
    machine: Machine, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Such as its warning that the driver is too old, and no more than that counts as its answer."""
    says = "import sys; print('hello', 7); print('the driver is too old', file=sys.stderr)\n"
    machine("nvidia0", torch=says + TORCH)
    assert devices.count_slots("gpu-or-1") == 1
    assert "the driver is too old" in "".join([*capfd.readouterr(), caplog.text])


@pytest.mark.parametrize(
    ("torch", "what"),
    [
        ("raise ImportError('no libcudart.so')", "exited with code 1 (ImportError: no libcudart.so)"),
        ("import os; os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
        ("raise SystemExit", "exited with code 0"),
    ],
)
def test_a_torch_that_cannot_answer_is_an_error_of_one_line(machine: Machine, torch: str, what: str) -> None:
    machine("nvidia0", torch=torch)
    with pytest.raises(UsageError) as raised:
        devices.count_slots("gpu-or-1")
    assert str(raised.value).startswith(
        f"torch cannot count the GPUs of this machine: the process that asked it {what}; "
    )
    assert f"{sys.executable} can import torch" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert devices.count_slots("2") == 2


def test_a_file_of_the_name_torch_in_the_working_directory_is_not_taken_for_it(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "torch.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path / "work")
    machine("nvidia0", gpus=4)
    assert devices.count_slots("gpu") == 4
