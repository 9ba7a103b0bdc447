"""Unmodified Fabric scripts in worlds that change."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from elastic_agent.exit_codes import ExitCode
from tests.faults.cluster import Cluster

SCRIPT = Path(__file__).parent / "fabric_train.py"
EVERY = 5
"""Steps between two checkpoints."""

pytestmark = [pytest.mark.system, pytest.mark.prove]


def start(cluster: Cluster, name: str, slots: int) -> None:
    cluster.start(
        name, slots, script=SCRIPT, arguments=("--folder", str(cluster.folder), "--every", str(EVERY))
    )


def first_step(cluster: Cluster, generation: int) -> int:
    return min(one["step"] for one in cluster.steps() if one["generation"] == generation)


def saved_before(cluster: Cluster, generation: int) -> int:
    """The last step at which the script saved before a generation."""
    steps = [one["step"] for one in cluster.steps() if one["generation"] < generation]
    return max(steps) // EVERY * EVERY


def test_training_continues_from_the_scripts_checkpoints(cluster: Cluster) -> None:
    """Nobody else knows what a script saves, so a notice is not handled: workers end as they do under torchrun."""
    start(cluster, "a", 2)
    start(cluster, "b", 1)
    unequal = cluster.wait_training("a", "b", steps=EVERY + 1)
    begun = [one for one in cluster.born() if one["generation"] == unequal]
    assert {one["rank"] for one in begun} == {0, 1, 2}
    assert {one["batches"] for one in begun} == {6}, "64 samples for 3 workers, in batches of 4"

    start(cluster, "c", 1)
    joined = cluster.wait_training("a", "b", "c", after=unequal, steps=EVERY + 1)
    assert first_step(cluster, joined) - 1 in (
        saved_before(cluster, joined),
        saved_before(cluster, joined) - EVERY,
    )

    cluster.agents["b"].terminate()
    left = cluster.wait_training("a", "c", after=joined, steps=EVERY + 1)
    os.kill(cluster.pid_of("a/1"), signal.SIGKILL)
    restarted = cluster.wait_training("a", "c", after=left)
    assert (first_step(cluster, restarted) - 1) % EVERY == 0
    assert first_step(cluster, restarted) > EVERY
    cluster.let_finish()
    assert cluster.wait_end("a", "c") == {"a": ExitCode.FINISHED, "c": ExitCode.FINISHED}
