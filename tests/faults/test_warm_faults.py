"""Warm workers that fail again and again leak nothing and restart as fast as at first."""

from __future__ import annotations

import json
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from .conftest import MakeCluster
from .rules import check_nothing_left

pytestmark = [pytest.mark.system, pytest.mark.prove]


def test_restarts_do_not_leak_or_slow_down(make_cluster: MakeCluster) -> None:
    restarts = 200
    window = restarts // 5  # at either end of the run, to be compared
    cluster = make_cluster("1", "--max-restarts", "100000", "--restart-window", "0.001")
    script = Path(__file__).with_name("restarting.py")
    arguments = (str(cluster.folder), str(restarts))
    cluster.start("a", 2, script=script, arguments=arguments)
    assert cluster.wait_end(timeout_s=240) == {"a": 0}, cluster.story()
    lines = [json.loads(line) for line in (cluster.folder / "restarts.jsonl").read_text().splitlines()]
    assert [line["generation"] for line in lines] == list(range(1, restarts + 1)), cluster.story()

    early, late = lines[window // 2 : window * 3 // 2], lines[-window:]
    for holder in ("agent", "guard", "spawner", "worker", "children", "heartbeat_files"):
        # The least of each window: at most moments something is about to be closed, as while a standby is forked.
        least_early, least_late = min(line[holder] for line in early), min(line[holder] for line in late)
        assert least_late <= least_early, f"{holder}: at least {least_early} early, {least_late} late"
    assert _pace_s(late) < 2 * _pace_s(early), [round(_pace_s(part), 3) for part in (early, late)]
    check_nothing_left(cluster)


def _pace_s(lines: list[dict[str, float]]) -> float:
    """The median time from one generation's first collective to the next one's."""
    times = [line["met_s"] for line in lines]
    return statistics.median(after - before for before, after in pairwise(times))
