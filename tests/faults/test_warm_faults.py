"""Warm workers under faults: no leaks, no leftover processes, and no worker depends on the spawner."""

from __future__ import annotations

import json
import os
import signal
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from elastic_agent import linux
from tests.processes import name_of

from .conftest import MakeCluster
from .rules import check_nothing_left, see_it_end

pytestmark = [pytest.mark.system, pytest.mark.prove]


def spawner_of(guard: int) -> int:
    return next(pid for pid in linux.children(guard) if name_of(pid) == "elastic-spawner")


def test_a_killed_spawner_does_not_end_the_generation_and_is_replaced(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("2")
    a = cluster.start("a", 2)
    cluster.start("b")
    first = cluster.wait_training("a", "b")
    os.kill(spawner_of(a.guard), signal.SIGKILL)
    cluster.wait_said(
        "a", "the spawner died (signal 9); starting a new one, running workers are not affected"
    )
    again = cluster.journal("spawner_ready", "a")
    cluster.wait("the next spawner", lambda: len(cluster.journal("spawner_ready", "a")) > len(again) or None)
    assert max(cluster.worlds()) == first, cluster.story()

    os.kill(cluster.pid_of("a/1"), signal.SIGKILL)
    cluster.wait_training("a", "b", after=first)
    see_it_end(cluster, restarts=1)


def test_restarts_do_not_leak_or_slow_down(make_cluster: MakeCluster) -> None:
    restarts = 200
    window = restarts // 5  # at either end of the run, to be compared
    cluster = make_cluster("1", "--max-restarts", "100000", "--restart-window", "0.001")
    script = Path(__file__).with_name("restarting.py")
    arguments = (str(cluster.folder), str(restarts))
    cluster.start("a", 2, script=script, arguments=arguments)
    assert cluster.wait_end(timeout_s=240) == {"a": 0}, cluster.story()
    lines = [json.loads(one) for one in (cluster.folder / "restarts.jsonl").read_text().splitlines()]
    assert [one["generation"] for one in lines] == list(range(1, restarts + 1)), cluster.story()

    early, late = lines[window // 2 : window * 3 // 2], lines[-window:]
    for holder in ("agent", "guard", "spawner", "worker", "children", "heartbeat_files"):
        # The least of each window: at most moments something is about to be closed, as while a standby is forked.
        least_early, least_late = min(one[holder] for one in early), min(one[holder] for one in late)
        assert least_late <= least_early, f"{holder}: at least {least_early} early, {least_late} late"
    assert _pace_s(late) < 2 * _pace_s(early), [round(_pace_s(part), 3) for part in (early, late)]
    check_nothing_left(cluster)


def _pace_s(lines: list[dict[str, float]]) -> float:
    """The median time from one generation's first collective to the next one's."""
    times = [one["met_s"] for one in lines]
    return statistics.median(after - before for before, after in pairwise(times))
