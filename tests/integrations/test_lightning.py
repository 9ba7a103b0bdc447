"""Unmodified Lightning scripts in worlds that change."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch

from elastic_agent.exit_codes import ExitCode
from tests.faults.cluster import Cluster
from tests.integrations.worlds import (
    check_resumed_from_checkpoint,
    first_step,
    history,
    last_step,
    steps_of,
)

SCRIPT = Path(__file__).parent / "lightning_train.py"
SAMPLES = 2400
SAMPLES_PER_STEP = 24

pytestmark = pytest.mark.system


def start(cluster: Cluster, name: str, slots: int, samples: int = SAMPLES) -> None:
    arguments = ("--folder", str(cluster.folder), "--samples", str(samples))
    cluster.start(name, slots, script=SCRIPT, arguments=arguments)


def check_each_sample_once(cluster: Cluster, samples: int = SAMPLES) -> None:
    """In every complete epoch, in steps of the same size whatever the world."""
    used: dict[int, Counter[int]] = {}
    for ranks in history(cluster):
        assert sum(len(line["ids"]) for line in ranks) == SAMPLES_PER_STEP
        for line in ranks:
            used.setdefault(line["epoch"], Counter()).update(line["ids"])
    for epoch in range(max(used)):
        assert used[epoch] == Counter(range(samples)), f"epoch {epoch}"


def check_same_as_one_process(cluster: Cluster, samples: int = SAMPLES) -> None:
    """Plain PyTorch gets the same weights from the same samples: model and optimizer were restored every time."""
    torch.manual_seed(1)
    layer = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    for ranks in history(cluster):
        losses = []
        for line in ranks:
            values = torch.tensor(line["ids"]).unsqueeze(1) / samples
            losses.append((layer(values) - 2 * values).square().mean())
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
        now = [parameter.item() for parameter in layer.parameters()]
        assert now == pytest.approx(ranks[0]["weights"], abs=1e-4), ranks[0]


def test_training_is_resumed_after_a_worker_was_killed_and_continues_in_a_smaller_world(
    cluster: Cluster,
) -> None:
    samples, epoch = 240, 240 // SAMPLES_PER_STEP
    start(cluster, "a", 2, samples)
    start(cluster, "b", 1, samples)
    unequal = cluster.wait_training("a", "b", steps=epoch + 3)
    assert {line["rank"] for line in steps_of(cluster, unequal)} == {0, 1, 2}

    os.kill(cluster.pid_of("a/1"), signal.SIGKILL)
    restarted = cluster.wait_training("a", "b", after=unequal)
    check_resumed_from_checkpoint(cluster, killed=unequal, restarted=restarted, every=epoch)

    cluster.agents["b"].signal(signal.SIGTERM)
    smaller = cluster.wait_training("a", after=restarted)
    assert first_step(cluster, smaller) == last_step(cluster, restarted) + 1
    cluster.let_finish()
    assert cluster.wait_end() == {"a": ExitCode.FINISHED, "b": ExitCode.DRAINED}
    check_each_sample_once(cluster, samples)
    check_same_as_one_process(cluster, samples)


@pytest.mark.prove
def test_training_continues_through_every_change_of_the_world(cluster: Cluster) -> None:
    start(cluster, "a", 2)
    start(cluster, "b", 1)
    unequal = cluster.wait_training("a", "b")
    assert {step["rank"] for step in steps_of(cluster, unequal)} == {0, 1, 2}

    start(cluster, "c", 1)
    joined = cluster.wait_training("a", "b", "c", after=unequal)
    assert first_step(cluster, joined) == last_step(cluster, unequal) + 1

    cluster.agents["b"].signal(signal.SIGTERM)
    left = cluster.wait_training("a", "c", after=joined)
    assert first_step(cluster, left) == last_step(cluster, joined) + 1

    os.kill(cluster.pid_of("a/1"), signal.SIGKILL)
    restarted = cluster.wait_training("a", "c", after=left)
    saved = last_step(cluster, joined)
    assert first_step(cluster, restarted) == saved + 1, "the newest checkpoint is that of the notice"

    cluster.agents["c"].signal(signal.SIGUSR1)
    assert cluster.wait_end() == {"a": ExitCode.STOPPED, "b": ExitCode.DRAINED, "c": ExitCode.STOPPED}
    stopped = last_step(cluster, restarted)

    start(cluster, "a", 1)
    start(cluster, "c", 1)
    resumed = cluster.wait_training("a", "c", after=restarted)
    assert first_step(cluster, resumed) == stopped + 1
    cluster.wait("a complete epoch", lambda: cluster.steps()[-1]["epoch"] or None)
    cluster.let_finish()
    assert cluster.wait_end("a", "c") == {"a": ExitCode.FINISHED, "c": ExitCode.FINISHED}

    check_each_sample_once(cluster)
    check_same_as_one_process(cluster)
