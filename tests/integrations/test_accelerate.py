"""A script with Accelerate (examples/accelerate_train.py as it stands) in worlds that change."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest

from elastic_agent.exit_codes import ExitCode
from tests.faults.cluster import Cluster

SCRIPT = Path(__file__).parent / "accelerate_train.py"
SAMPLES = 4001

pytestmark = [pytest.mark.system, pytest.mark.prove]


def start(cluster: Cluster, name: str, slots: int) -> None:
    arguments = ("--folder", str(cluster.folder), "--samples", str(SAMPLES), "--epochs", "1")
    start_agent = cluster.start if cluster.agents else cluster.start_host
    start_agent(name, slots, script=SCRIPT, arguments=arguments)


def test_nodes_join_and_leave_and_the_run_is_stopped_and_each_sample_is_used_once(cluster: Cluster) -> None:
    start(cluster, "a", 2)
    first = cluster.wait_training("a")
    start(cluster, "b", 1)
    second = cluster.wait_training("a", "b", after=first)
    cluster.agents["b"].terminate()
    assert cluster.wait_end("b") == {"b": ExitCode.DRAINED}, cluster.story()
    third = cluster.wait_training("a", after=second)
    cluster.agents["a"].signal(signal.SIGUSR1)
    assert cluster.wait_end("a") == {"a": ExitCode.STOPPED}, cluster.story()

    cluster.let_finish()
    start(cluster, "a", 1)
    assert cluster.wait_end("a") == {"a": ExitCode.FINISHED}, cluster.story()
    assert {one["generation"] for one in cluster.steps()} > {first, second, third}
    assert {one["restarts"] for one in cluster.steps()} == {0}
    # The last generation has one worker: no padding at the end of the epoch.
    used = Counter(target for line in cluster.steps() for target in line["targets"])
    assert used == Counter(json.loads((cluster.folder / "targets.json").read_text()))
