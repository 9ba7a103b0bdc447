"""Two machines with a systemd each make one world, and a machine that reboots takes its place again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .container import Container, booted
from .jobs import AGENT, PORT, RENDEZVOUS, SERVER, SOON, Job

pytestmark = [pytest.mark.system, pytest.mark.prove]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Container]]:
    with booted(tmp_path, "n1", "n2") as machines:
        for machine in machines:
            machine.install(AGENT)
            machine.edit(AGENT.name, SOON)
        yield machines


def test_a_rebooted_machine_rejoins_and_the_run_continues(
    machines: list[Container],
) -> None:
    head, other = machines
    head.install(RENDEZVOUS)
    head.edit(RENDEZVOUS.name, SERVER)
    for machine in machines:
        machine.boot()
    head.systemctl("enable", "--now", RENDEZVOUS.name)
    job = Job("digits", machines, {"nnodes": "2"})
    job.start()
    first = job.wait_training("n1", "n2")
    job.wait_status(r"generation \d: 2 nodes, 2 workers, step \d+", other)
    place = job.ranks(first)

    head.wait("a checkpoint", (job.folder / "checkpoint.json").exists)
    other.cut_power()
    job.wait_status(r"waiting for 1 more node \(at least 2 required\).*", head)
    saved = job.checkpoint()["step"]
    other.boot()
    second = job.wait_training("n1", "n2", after=first)
    assert job.ranks(second) == place
    assert min(job.steps(second)) > saved > 0

    other.systemctl("--no-block", "reboot")
    other.wait_off()
    assert job.checkpoint()["why"] == "told", "a machine that goes down in good order leaves in good order"
    other.boot()
    third = job.wait_training("n1", "n2", after=second)
    assert job.ranks(third) == place
    assert min(job.steps(third)) > max(job.steps(second))

    job.finish()
    for machine in machines:
        machine.wait_state(job.unit, "inactive")
        assert job.ended(machine)["Result"] == "success"
    assert other.run("systemctl", "start", job.unit).returncode, "the run had finished before on this machine"
    other.wait_state(job.unit, "failed")
    assert (job.ended(other)["ExecMainStatus"], job.ended(other)["NRestarts"]) == ("5", "0")
    assert "the run finished before this agent was started" in job.status(other)
    assert head.show(RENDEZVOUS.name, "StatusText")["StatusText"].startswith(f"at n1:{PORT}, ")


def test_a_machine_that_leaves_keeps_serving_the_store_and_reports_it(machines: list[Container]) -> None:
    host, other = machines
    for machine in machines:
        machine.boot()
    job = Job("hosted", machines, {"nnodes": "1:2"})
    host.systemctl("enable", "--now", job.unit)
    other.systemctl("enable", "--now", job.unit)
    both = job.wait_training("n1", "n2")
    host.systemctl("stop", "--no-block", job.unit)
    still = r"SIGTERM received: local workers are done; keeping the rendezvous store up for run hosted until it ends"
    job.wait_status(still, host)
    job.wait_training("n2", after=both)
    assert host.show(job.unit, "ActiveState")["ActiveState"] == "deactivating"

    job.finish()
    for machine, code in ((host, "6"), (other, "0")):
        machine.wait_state(job.unit, "inactive")
        assert job.ended(machine)["ExecMainStatus"] == code
