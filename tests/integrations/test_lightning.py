"""Unmodified Lightning scripts in worlds that change."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent.exit_codes import ExitCode
from tests.faults.cluster import Cluster, Line

SCRIPT = Path(__file__).parent / "lightning_train.py"

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, "1:4", ("--preload", "lightning")) as made:
        yield made


def start(cluster: Cluster, name: str, slots: int) -> None:
    cluster.start(name, slots, script=SCRIPT, arguments=("--folder", str(cluster.folder)))


def steps_of(cluster: Cluster, generation: int) -> list[Line]:
    return [one for one in cluster.steps() if one["generation"] == generation]


def last_step(cluster: Cluster, generation: int) -> int:
    """After which all ranks left: it is the same on each."""
    last: dict[str, int] = {}
    for one in steps_of(cluster, generation):
        last[one["worker_id"]] = one["step"]
    assert len({*last.values()}) == 1, (last, cluster.story())
    return last.popitem()[1]


def first_step(cluster: Cluster, generation: int) -> int:
    return min(one["step"] for one in steps_of(cluster, generation))


def test_training_continues_through_every_change_of_the_world(cluster: Cluster) -> None:
    start(cluster, "a", 2)
    start(cluster, "b", 1)
    unequal = cluster.wait_training("a", "b")
    assert {one["rank"] for one in steps_of(cluster, unequal)} == {0, 1, 2}

    start(cluster, "c", 1)
    joined = cluster.wait_training("a", "b", "c", after=unequal)
    assert first_step(cluster, joined) == last_step(cluster, unequal) + 1

    cluster.agents["b"].terminate()
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
    cluster.let_finish()
    cluster.wait_end()
