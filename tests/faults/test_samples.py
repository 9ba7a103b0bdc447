"""Each sample exactly once, with a plain DDP script (examples/elastic_ddp.py as it stands) in a changing world."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter

import pytest

from elastic_agent.exit_codes import ExitCode
from elastic_agent.testing.processes import Line

from .cluster import COUNTING_SAMPLES, Cluster
from .conftest import MakeCluster

pytestmark = [pytest.mark.system, pytest.mark.prove]

SAMPLES, GLOBAL_BATCH = 3_007, 12
"""The last step has 7 samples."""
ARGUMENTS = (
    "--samples",
    str(SAMPLES),
    "--global-batch",
    str(GLOBAL_BATCH),
    "--epochs",
    "1",
    "--reproducible",
)


def start(cluster: Cluster, name: str, slots: int, *more: str) -> None:
    first = not cluster.agents
    how = cluster.start_host if first else cluster.start
    how(name, slots, script=COUNTING_SAMPLES, arguments=(*ARGUMENTS, *more))


def losses(cluster: Cluster) -> dict[int, float]:
    """Loss by step, of the last time that the step was taken."""
    found: dict[int, float] = {}
    for agent in cluster.agents.values():
        text = agent.log.read_text()
        found |= {int(step): float(loss) for step, loss in re.findall(r"step=(\d+) loss=(\S+)", text)}
    return found


def ids(lines: list[Line]) -> list[int]:
    return [sample for line in lines for sample in line["samples"]]


def check_each_sample_once(cluster: Cluster) -> None:
    times = Counter(ids(cluster.steps()))
    assert set(times.values()) == {1}, {sample: n for sample, n in times.items() if n > 1}
    assert set(times) == set(range(SAMPLES))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of three workers that nothing happens to."""
    with Cluster(tmp_path_factory.mktemp("undisturbed"), "1") as cluster:
        cluster.let_finish()
        start(cluster, "a", 3)
        assert set(cluster.wait_end().values()) == {ExitCode.FINISHED}, cluster.story()
        check_each_sample_once(cluster)
        return losses(cluster)


def test_the_loss_after_a_stop_is_bit_identical_and_after_a_crash_the_lost_samples_are_used_again(
    make_cluster: MakeCluster, undisturbed: dict[int, float]
) -> None:
    cluster = make_cluster("2")
    every = 10
    start(cluster, "a", 2, "--checkpoint-every", str(every))
    start(cluster, "b", 1, "--checkpoint-every", str(every))
    first = cluster.wait_training("a", "b")
    cluster.agents["b"].signal(signal.SIGUSR1)
    assert set(cluster.wait_end().values()) == {ExitCode.STOPPED}, cluster.story()

    start(cluster, "a", 2, "--checkpoint-every", str(every))
    start(cluster, "b", 1, "--checkpoint-every", str(every))
    second = cluster.wait_training("a", "b", after=first, steps=3 * every)
    victim = next(line for line in reversed(cluster.born()) if line["node_id"] == "b")
    os.kill(victim["pid"], signal.SIGKILL)
    third = cluster.wait_training("a", "b", after=second)
    cluster.let_finish()
    assert set(cluster.wait_end().values()) == {ExitCode.FINISHED}, cluster.story()

    assert losses(cluster) == undisturbed
    by_generation = {
        generation: [line for line in cluster.steps() if line["generation"] == generation]
        for generation in (first, second, third)
    }
    restored = next(line["step"] for line in by_generation[third]) - GLOBAL_BATCH
    assert restored % (every * GLOBAL_BATCH) == 0
    lost = ids([line for line in by_generation[second] if line["step"] > restored])
    times = Counter(ids(cluster.steps()))
    assert set(times) == set(range(SAMPLES))
    assert {sample for sample, n in times.items() if n > 1} == set(lost)
    assert max(times.values()) == 2
