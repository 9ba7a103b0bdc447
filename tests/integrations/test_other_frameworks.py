"""Scripts with Accelerate (as in examples/accelerate_train.py), Fabric and LightlyTrain in worlds that change."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from elastic_agent.exit_codes import ExitCode
from tests.faults.cluster import Cluster

from .worlds import first_step, steps_of

EVERY = 5
"""Steps between two checkpoints of the script with Fabric."""
ARGUMENTS = {
    "accelerate_train.py": ("--samples", "4001", "--epochs", "1"),
    "fabric_train.py": ("--every", str(EVERY)),
    "lightly_pretrain.py": (),
}

pytestmark = [pytest.mark.system, pytest.mark.prove]


def start(cluster: Cluster, script: str, name: str, slots: int, *options: str) -> None:
    arguments = ("--folder", str(cluster.folder), *ARGUMENTS[script])
    start_agent = cluster.start if cluster.agents else cluster.start_host
    start_agent(name, slots, *options, script=Path(__file__).parent / script, arguments=arguments)


def test_nodes_join_and_leave_and_the_run_is_stopped_and_each_sample_is_used_once(cluster: Cluster) -> None:
    start(cluster, "accelerate_train.py", "a", 2)
    first = cluster.wait_training("a")
    start(cluster, "accelerate_train.py", "b", 1)
    second = cluster.wait_training("a", "b", after=first)
    cluster.agents["b"].signal(signal.SIGTERM)
    assert cluster.wait_end("b") == {"b": ExitCode.DRAINED}, cluster.story()
    third = cluster.wait_training("a", after=second)
    cluster.agents["a"].signal(signal.SIGUSR1)
    assert cluster.wait_end("a") == {"a": ExitCode.STOPPED}, cluster.story()

    cluster.let_finish()
    start(cluster, "accelerate_train.py", "a", 1)
    assert cluster.wait_end("a") == {"a": ExitCode.FINISHED}, cluster.story()
    assert {line["generation"] for line in cluster.steps()} > {first, second, third}
    assert {line["restarts"] for line in cluster.steps()} == {0}
    # The last generation has one worker: no padding at the end of the epoch.
    used = Counter(target for line in cluster.steps() for target in line["targets"])
    assert used == Counter(json.loads((cluster.folder / "targets.json").read_text()))


def test_training_with_fabric_continues_from_the_scripts_checkpoints(cluster: Cluster) -> None:
    """Nobody else knows what a script saves, so a notice is not handled: workers end as they do under torchrun."""
    for name, slots in (("a", 2), ("b", 1)):
        start(cluster, "fabric_train.py", name, slots)
    unequal = cluster.wait_training("a", "b", steps=EVERY + 1)
    begun = [line for line in cluster.born() if line["generation"] == unequal]
    assert {line["rank"] for line in begun} == {0, 1, 2}
    assert {line["batches"] for line in begun} == {6}, "64 samples for 3 workers, in batches of 4"

    start(cluster, "fabric_train.py", "c", 1)
    joined = cluster.wait_training("a", "b", "c", after=unequal, steps=EVERY + 1)
    saved = max(line["step"] for line in cluster.steps() if line["generation"] < joined) // EVERY * EVERY
    assert first_step(cluster, joined) - 1 in (saved, saved - EVERY)

    cluster.agents["b"].signal(signal.SIGTERM)
    left = cluster.wait_training("a", "c", after=joined, steps=EVERY + 1)
    os.kill(cluster.pid_of("a/1"), signal.SIGKILL)
    restarted = cluster.wait_training("a", "c", after=left)
    assert (first_step(cluster, restarted) - 1) % EVERY == 0
    assert first_step(cluster, restarted) > EVERY
    cluster.let_finish()
    assert cluster.wait_end("a", "c") == {"a": ExitCode.FINISHED, "c": ExitCode.FINISHED}


def test_pretraining_with_lightly_train_continues_in_unequal_and_changed_worlds(cluster: Cluster) -> None:
    pytest.importorskip("lightly_train", exc_type=(ImportError, RuntimeError))  # needs torch for GPUs
    for name, slots in (("a", 2), ("b", 1)):
        start(cluster, "lightly_pretrain.py", name, slots, "--preload", "lightly_train")
    unequal = cluster.wait_training("a", "b", steps=9)
    assert {line["rank"] for line in cluster.steps()} == {0, 1, 2}
    assert "using a global batch of 6 instead of 8: 3 workers" in cluster.agents["a"].said()

    def newest(generation: int) -> int:
        return int(max(line["step"] for line in steps_of(cluster, generation)))

    os.kill(cluster.pid_of("a/1"), signal.SIGKILL)
    restarted = cluster.wait_training("a", "b", after=unequal)
    assert 1 < first_step(cluster, restarted) <= newest(unequal) + 1, "from a checkpoint"

    cluster.agents["b"].signal(signal.SIGTERM)
    left = cluster.wait_training("a", after=restarted)
    assert first_step(cluster, left) == newest(restarted) + 1, "from the step of the notice"
    cluster.let_finish()
    assert cluster.wait_end() == {"a": ExitCode.FINISHED, "b": ExitCode.DRAINED}
