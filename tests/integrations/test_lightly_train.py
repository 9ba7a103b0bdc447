"""Unmodified LightlyTrain scripts in worlds that change. It can only be imported beside a build of torch for GPUs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from elastic_agent.exit_codes import ExitCode
from tests.faults.cluster import Cluster

SCRIPT = Path(__file__).parent / "lightly_pretrain.py"

OPTIONS = ("--preload", "lightly_train")

pytestmark = [pytest.mark.system, pytest.mark.prove]


def start(cluster: Cluster, name: str, slots: int) -> None:
    cluster.start(name, slots, script=SCRIPT, arguments=("--folder", str(cluster.folder)))


def steps(cluster: Cluster, generation: int) -> list[int]:
    return [one["step"] for one in cluster.steps() if one["generation"] == generation]


def test_pretraining_continues_in_unequal_and_changed_worlds(cluster: Cluster) -> None:
    pytest.importorskip("lightly_train", exc_type=(ImportError, RuntimeError))
    start(cluster, "a", 2)
    start(cluster, "b", 1)
    unequal = cluster.wait_training("a", "b", steps=9)
    assert {one["rank"] for one in cluster.steps()} == {0, 1, 2}
    assert "using a global batch of 6 instead of 8: 3 workers" in cluster.agents["a"].said()

    os.kill(cluster.pid_of("a/1"), signal.SIGKILL)
    restarted = cluster.wait_training("a", "b", after=unequal)
    assert 1 < min(steps(cluster, restarted)) <= max(steps(cluster, unequal)) + 1, "from a checkpoint"

    cluster.agents["b"].terminate()
    left = cluster.wait_training("a", after=restarted)
    assert min(steps(cluster, left)) == max(steps(cluster, restarted)) + 1, "from the step of the notice"
    cluster.let_finish()
    assert cluster.wait_end() == {"a": ExitCode.FINISHED, "b": ExitCode.DRAINED}
