"""The agent as torch's interfaces show it: an ``ElasticAgent`` with a ``RendezvousHandler``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
from torch.distributed.elastic.rendezvous.api import RendezvousStateError

from elastic_agent.agent.worker_group.environment import RunFacts, worker_environment
from elastic_agent.agent.worker_group.factory import worker_group
from elastic_agent.protocol import Address, Seat, World
from elastic_agent.rendezvous.handler import AgentRendezvous
from tests.cli.support import clean_environment

SEATS = (
    Seat("a", "a-1", "10.0.0.1", 2, 0, "trainer"),
    Seat("b", "b-1", "10.0.0.2", 1, 2, "reader"),
    Seat("c", "c-1", "10.0.0.3", 2, 3, "trainer"),
)
WORLD = World(4, SEATS, Address("10.0.0.1", 29500), "a")


def described(slots: int) -> WorkerSpec:
    return WorkerSpec("trainer", slots, AgentRendezvous("run", "c10d"), entrypoint="train.py")


@pytest.mark.parametrize("seat", SEATS, ids=lambda seat: seat.node_id)
def test_the_worker_group_has_the_ranks_that_its_workers_see(seat: Seat) -> None:
    facts = RunFacts("run", seat.role, 0, 3, False, "/dev/shm/x", 40)
    group = worker_group(described(seat.slots), WORLD, seat.incarnation)
    assert len(group.workers) == seat.slots
    for worker in group.workers:
        env = worker_environment({}, facts, WORLD, seat, worker.local_rank)
        seen = [worker.local_rank, worker.global_rank, worker.world_size]
        assert seen == [int(env[name]) for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE")]
        roles = [worker.role_rank, worker.role_world_size]
        assert roles == [int(env[name]) for name in ("ROLE_RANK", "ROLE_WORLD_SIZE")]
        ranks = [group.group_rank, group.group_world_size, group.master_addr, group.master_port]
        names = ("GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        assert [str(one) for one in ranks] == [env[name] for name in names]


@pytest.mark.parametrize(
    ("inherited", "share"),
    [
        pytest.param({"SLURM_STEP_ID": "0", "SLURM_CPUS_PER_TASK": "17"}, "8", id="two workers"),
        pytest.param(
            {"SLURM_STEP_ID": "0", "SLURM_CPUS_PER_TASK": "1"}, "1", id="fewer processors than workers"
        ),
        pytest.param({"SLURM_STEP_ID": "0"}, None, id="not set"),
        pytest.param({"SLURM_CPUS_PER_TASK": "16"}, None, id="outside of a step"),
    ],
)
def test_the_workers_of_a_slurm_task_share_its_processors(
    inherited: dict[str, str], share: str | None
) -> None:
    facts = RunFacts("run", "trainer", 0, 3, False, "/dev/shm/x", 40)
    for slot in range(2):
        env = worker_environment(inherited, facts, WORLD, SEATS[0], slot)
        assert env.get("SLURM_CPUS_PER_TASK") == share


def test_a_node_without_a_seat_has_no_ranks() -> None:
    group = worker_group(described(2), WORLD, "d-1")
    assert (group.state, group.group_rank) == (WorkerState.INIT, None)


def test_the_rendezvous_forms_no_world_on_request() -> None:
    handler = AgentRendezvous("run", "etcd")
    assert (handler.get_run_id(), handler.get_backend(), handler.use_agent_store) == ("run", "etcd", True)
    handler.set_closed()
    assert (handler.is_closed(), handler.num_nodes_waiting(), handler.shutdown()) == (False, 0, True)
    with pytest.raises(RendezvousStateError, match="does not accept requests"):
        handler.next_rendezvous()


RUN_BY_TORCHS_INTERFACE = """
import json, os, sys
from torch.distributed.elastic.agent.server.api import ElasticAgent
from elastic_agent.agent.agent import Agent
from elastic_agent.agent.backend import configured_backend
from elastic_agent.config.secret_variables import SecretVariables
from elastic_agent.agent.worker_group.interruptions import StopSignals
from elastic_agent.config.load import load_settings
from elastic_agent.sd_notify import SystemdNotifier
from elastic_agent.workers.guard.client import Guard

settings = load_settings(sys.argv[1:], os.environ).settings
backend = configured_backend(settings, SecretVariables())
notifier = SystemdNotifier.taken_from(os.environ)
agent: ElasticAgent = Agent(settings, 2, Guard.start(), backend, notifier, StopSignals())
before = agent.get_worker_group()
result = agent.run()
group = agent.get_worker_group()
ranks = [worker.global_rank for worker in group.workers]
print(json.dumps([before.state, before.spec.local_world_size, result.state, group.state, ranks]))
"""


def test_torchs_interface_runs_the_agent_and_shows_its_workers(tmp_path: Path) -> None:
    options = ["--standalone", "--state-dir", str(tmp_path), "--worker-start", "cold"]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            RUN_BY_TORCHS_INTERFACE,
            *options,
            "--nproc-per-node",
            "2",
            "--no-python",
            "true",
        ],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["INIT", 2, "SUCCEEDED", "HEALTHY", [0, 1]]
