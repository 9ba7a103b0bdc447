"""The variables that torchrun's workers have, for nodes with different numbers of workers."""

from __future__ import annotations

import pytest

from elastic_agent.agent.worker_group.command import RunFacts, worker_environment
from elastic_agent.config.settings import Settings
from elastic_agent.protocol import Address, Seat, World

SEATS = (
    Seat("a", "a-1", "10.0.0.1", 2, 0, "trainer"),
    Seat("b", "b-1", "10.0.0.2", 1, 2, "reader"),
    Seat("c", "c-1", "10.0.0.3", 2, 3, "trainer"),
)
FACTS = RunFacts("run", 0, "/dev/shm/x")
WORLD = World(4, SEATS, Address("10.0.0.1", 29500), "a")


def test_ranks_count_over_the_nodes_and_over_those_with_the_same_role() -> None:
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")
    seen = []
    for seat in SEATS:
        for slot in range(seat.slots):
            env = worker_environment({}, Settings(), FACTS, WORLD, seat, slot)
            seen.append([int(env[name]) for name in names])
            assert (env["WORLD_SIZE"], env["GROUP_WORLD_SIZE"]) == ("5", "3")
            assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.0.0.1", "29500")
    assert seen == [[0, 0, 0, 0, 4], [1, 1, 0, 1, 4], [2, 0, 1, 0, 1], [3, 0, 2, 2, 4], [4, 1, 2, 3, 4]]


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
    for slot in range(2):
        env = worker_environment(inherited, Settings(), FACTS, WORLD, SEATS[0], slot)
        assert env.get("SLURM_CPUS_PER_TASK") == share
