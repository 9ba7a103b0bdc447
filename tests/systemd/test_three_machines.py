"""Three machines with a systemd each host the store together, and none is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.etcd import need_etcd

from .container import booted
from .jobs import AGENT, PORT, RENDEZVOUS, SERVER, SOON, Job

pytestmark = [pytest.mark.system, pytest.mark.prove]

NAMES = ("n1", "n2", "n3")
ENDPOINT = ",".join(f"{name}:{PORT}" for name in NAMES)


def test_agents_host_the_store_and_training_goes_on_without_the_first_machine(tmp_path: Path) -> None:
    need_etcd()
    with booted(tmp_path, *NAMES) as machines:
        for machine in machines:
            machine.install(AGENT)
            machine.edit(AGENT.name, SOON)
            machine.boot()
        job = Job("digits", machines, {"nnodes": "1:3", "settle": 5.0, "rdzv_endpoint": ENDPOINT})
        job.start()
        first = job.wait_training(*NAMES)
        machines[0].cut_power()
        second = job.wait_training("n2", "n3", after=first)
        machines[0].boot()
        job.wait_training(*NAMES, after=second)
        job.finish()
        for machine in machines:
            machine.wait_state(job.unit, "inactive")
            assert job.ended(machine)["Result"] == "success"


def test_store_servers_can_be_lost_and_restarted_without_an_effect_on_the_run(tmp_path: Path) -> None:
    need_etcd()
    server = f"{SERVER}Environment=ELASTIC_AGENT_RDZV_ENDPOINT={ENDPOINT}\n"
    with booted(tmp_path, *NAMES, "n4") as (*servers, worker):
        for machine in servers:
            machine.install(RENDEZVOUS)
            machine.edit(RENDEZVOUS.name, server)
            machine.boot()
            machine.systemctl("enable", "--now", RENDEZVOUS.name)
        worker.install(AGENT)
        worker.edit(AGENT.name, SOON)
        worker.boot()
        job = Job("digits", [worker], {"rdzv_endpoint": ENDPOINT, "nnodes": "1:2"})
        job.start()
        generation = job.wait_training("n4")
        servers[0].cut_power()
        taken = len(job.steps(generation))
        worker.wait("steps without the first server", lambda: len(job.steps(generation)) > taken + 50)
        servers[0].boot()
        servers[0].wait_state(RENDEZVOUS.name, "active")
        job.finish()
        worker.wait_state(job.unit, "inactive")
        assert job.ended()["Result"] == "success"
        assert max(line["generation"] for line in job.lines("step")) == generation
