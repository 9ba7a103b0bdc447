"""Unmodified scripts with the Trainer of transformers in worlds that change."""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from elastic_agent.exit_codes import ExitCode
from elastic_agent.testing.processes import Line
from tests.faults.cluster import Cluster
from tests.integrations.worlds import (
    history,
    steps_of,
)

SCRIPT = Path(__file__).parent / "transformers_train.py"
SAMPLES = 1001
EVERY = 20
"""Steps between two checkpoints."""
OPTIONS = ("--preload", "transformers.trainer,accelerate", "--shutdown-timeout", "300")
"""What others test, and would take most of the time; and more time to save than steps are held up for."""
CONSTANT = ("--batch-size", "1", "--samples-per-step", "12", "--no-dropout")
ARGUMENTS = ("--samples", str(SAMPLES), "--epochs", "1", "--batch-size", "2", "--save-steps", str(EVERY))

pytestmark = pytest.mark.system


def start(cluster: Cluster, name: str, slots: int, *more: str) -> None:
    arguments = ("--folder", str(cluster.folder), *ARGUMENTS, *more)
    start_agent = cluster.start if cluster.agents else cluster.start_host
    start_agent(name, slots, script=SCRIPT, arguments=arguments, HF_HUB_OFFLINE="1")


def ids(lines: list[Line]) -> list[int]:
    return [sample for line in lines for sample in line["ids"]]


def losses(cluster: Cluster) -> dict[tuple[int, int], list[float]]:
    """Return of each step and rank, the last time that it was taken."""
    return {(line["step"], line["rank"]): line["losses"] for line in cluster.steps()}


def loss_of_steps(cluster: Cluster) -> list[float]:
    """The mean over all samples of each step whose effect lasted."""
    return [sum(sum(line["losses"]) for line in ranks) / len(ranks) for ranks in history(cluster)]


@pytest.mark.prove
def test_an_epoch_with_five_membership_changes_uses_each_sample_once_with_the_losses_of_one_worker(
    cluster: Cluster, tmp_path: Path
) -> None:
    start(cluster, "a", 1, *CONSTANT)
    start(cluster, "b", 2, *CONSTANT)
    generation = cluster.wait_training("a", "b", steps=3)
    generations = [generation]
    for joins, leaves in (("c", ""), ("", "b"), ("b", ""), ("", "c"), ("", "b")):
        if joins:
            start(cluster, joins, {"b": 2, "c": 1}[joins], *CONSTANT)
        else:
            cluster.agents[leaves].signal(signal.SIGTERM)
            assert cluster.wait_end(leaves)[leaves] == ExitCode.DRAINED, cluster.story()
            del cluster.agents[leaves]
        generation = cluster.wait_training(*sorted(cluster.agents), after=generation, steps=3)
        generations.append(generation)
    cluster.let_finish()
    assert cluster.wait_end() == {"a": ExitCode.FINISHED}, cluster.story()

    # All ranks left after the same step, and the next generation took the next one.
    for before, after in itertools.pairwise(generations):
        last = {step["rank"]: step["step"] for step in steps_of(cluster, before)}
        assert len({*last.values()}) == 1, cluster.story()
        assert {step["step"] for step in steps_of(cluster, after)} >= {last[0] + 1}
        assert min(step["step"] for step in steps_of(cluster, after)) == last[0] + 1
    # The last generation has one worker: no padding at the end of the epoch.
    times = Counter(ids(cluster.steps()))
    assert set(times) == set(range(SAMPLES))
    assert set(times.values()) == {1}
    final = cluster.steps()[-1]
    assert (final["epoch"], final["step"]) == (1, final["of"])
    assert {worker["restarts"] for worker in cluster.born()} == {0}

    (tmp_path / "undisturbed").mkdir()
    with Cluster(tmp_path / "undisturbed", "1", OPTIONS) as undisturbed:
        undisturbed.let_finish()
        start(undisturbed, "a", 1, *CONSTANT)
        assert undisturbed.wait_end() == {"a": ExitCode.FINISHED}, undisturbed.story()
    assert loss_of_steps(cluster) == pytest.approx(loss_of_steps(undisturbed), abs=1e-4)


@pytest.mark.prove
def test_stopped_and_crashed_training_continues_with_the_same_losses_and_samples(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "undisturbed").mkdir()
    with Cluster(tmp_path / "undisturbed", "1", OPTIONS) as undisturbed:
        undisturbed.let_finish()
        start(undisturbed, "a", 3)
        assert set(undisturbed.wait_end().values()) == {ExitCode.FINISHED}, undisturbed.story()
        expected = losses(undisturbed)

    start(cluster, "a", 2)
    start(cluster, "b", 1)
    first = cluster.wait_training("a", "b")
    cluster.agents["b"].signal(signal.SIGUSR1)
    assert set(cluster.wait_end().values()) == {ExitCode.STOPPED}, cluster.story()
    start(cluster, "a", 2)
    start(cluster, "b", 1)
    second = cluster.wait_training("a", "b", after=first, steps=25)
    os.kill(cluster.pid_of("b/0"), signal.SIGKILL)
    third = cluster.wait_training("a", "b", after=second)
    cluster.agents["a"].signal(signal.SIGUSR1)
    assert set(cluster.wait_end().values()) == {ExitCode.STOPPED}, cluster.story()
    same_world = losses(cluster)
    assert same_world == {key: expected[key] for key in same_world}
    saved = max(step["step"] for step in steps_of(cluster, third))

    cluster.let_finish()
    start(cluster, "a", 1)
    start(cluster, "b", 1)
    assert set(cluster.wait_end().values()) == {ExitCode.FINISHED}, cluster.story()
    fourth = cluster.steps()[-1]["generation"]
    assert {step["rank"] for step in steps_of(cluster, fourth)} == {0, 1}
    assert min(step["step"] for step in steps_of(cluster, fourth)) == saved + 1

    restored = min(step["step"] for step in steps_of(cluster, third)) - 1
    assert restored % EVERY == 0
    lost = ids([step for step in steps_of(cluster, second) if step["step"] > restored])
    assert lost
    times = Counter(ids(cluster.steps()))
    times.subtract(lost)
    assert set(times) == set(range(SAMPLES))
    # 1,001 is odd: at the end of the epoch, Accelerate fills the last batches of two workers.
    assert sum(times.values()) - SAMPLES < 4
    assert max(times.values()) <= 2
