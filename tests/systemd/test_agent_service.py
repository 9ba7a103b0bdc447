"""An agent as a service of a real systemd: start, stop, crash, hang, and what a person sees meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .container import Container, booted
from .jobs import AGENT, SOON, Job

pytestmark = pytest.mark.systemd


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """One machine for all tests here; each has a job of its own on it."""
    with booted(tmp_path_factory.mktemp("systemd"), "n1") as (machine,):
        machine.install(AGENT, SOON)
        machine.boot()
        yield machine


def test_stop_lets_the_workers_save_and_leaves_no_process(machine: Container) -> None:
    job = Job("digits", machine)
    job.install()
    machine.systemctl("enable", "--now", job.unit)
    assert job.status().startswith("generation 1: 1 node, 1 worker")
    job.wait_training("n1")
    job.wait_status(r"generation 1: 1 node, 1 worker, step \d+")
    shown = machine.systemctl("status", job.unit)
    assert "active (running)" in shown
    assert 'Status: "generation 1: 1 node, 1 worker, step ' in shown
    processes = machine.processes(job.unit)

    machine.systemctl("stop", job.unit)
    last = job.lines("step")[-1]["step"]
    assert job.checkpoint() == {"step": last, "why": "told"}
    assert machine.show(job.unit, "ActiveState", "Result", "ExecMainStatus") == {
        "ActiveState": "inactive",
        "Result": "success",
        "ExecMainStatus": "6",
    }
    assert job.status() == "drained: SIGTERM received"
    assert [pid for pid in processes if Path(f"/proc/{pid}").exists()] == []
