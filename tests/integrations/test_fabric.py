"""Unmodified Fabric scripts in worlds that change."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent.exit_codes import ExitCode
from tests.faults.cluster import Cluster

SCRIPT = Path(__file__).parent / "fabric_train.py"
EVERY = 5
"""Steps between two checkpoints."""

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, "1:4", ("--preload", "lightning", "--no-learn-preload")) as made:
        yield made


def start(cluster: Cluster, name: str, slots: int) -> None:
    cluster.start(
        name, slots, script=SCRIPT, arguments=("--folder", str(cluster.folder), "--every", str(EVERY))
    )


def last_step(cluster: Cluster, generation: int) -> int:
    """After which all ranks left: it is the same on each."""
    last = {one["worker_id"]: one["step"] for one in cluster.steps() if one["generation"] == generation}
    assert len({*last.values()}) == 1, (last, cluster.story())
    return int(last.popitem()[1])


def first_step(cluster: Cluster, generation: int) -> int:
    return min(one["step"] for one in cluster.steps() if one["generation"] == generation)


def test_training_continues_from_the_scripts_checkpoints(cluster: Cluster) -> None:
    start(cluster, "a", 2)
    start(cluster, "b", 1)
    unequal = cluster.wait_training(
        "a", "b", steps=2 * EVERY + 1
    )  # as often as it has to save to be waited for
    begun = [one for one in cluster.born() if one["generation"] == unequal]
    assert {one["rank"] for one in begun} == {0, 1, 2}
    assert {one["batches"] for one in begun} == {6}, "64 samples for 3 workers, in batches of 4"

    start(cluster, "c", 1)
    joined = cluster.wait_training("a", "b", "c", after=unequal, steps=2 * EVERY + 1)
    left_at = last_step(cluster, unequal)
    assert left_at % EVERY == 0, "all ranks leave after a checkpoint of the script"
    assert first_step(cluster, joined) == left_at + 1

    cluster.agents["b"].terminate()
    left = cluster.wait_training("a", "c", after=joined, steps=EVERY + 1)
    assert first_step(cluster, left) == last_step(cluster, joined) + 1

    os.kill(cluster.pid_of("a/1"), signal.SIGKILL)
    restarted = cluster.wait_training("a", "c", after=left, steps=2 * EVERY + 1)
    assert (first_step(cluster, restarted) - 1) % EVERY == 0

    cluster.agents["c"].signal(signal.SIGUSR1)
    assert cluster.wait_end() == {"a": ExitCode.STOPPED, "b": ExitCode.DRAINED, "c": ExitCode.STOPPED}

    start(cluster, "a", 1)
    start(cluster, "c", 1)
    resumed = cluster.wait_training("a", "c", after=restarted)
    assert first_step(cluster, resumed) == last_step(cluster, restarted) + 1
    cluster.let_finish()
    assert cluster.wait_end("a", "c") == {"a": ExitCode.FINISHED, "c": ExitCode.FINISHED}
