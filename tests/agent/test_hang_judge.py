"""Warnings about workers that make no progress, before they are restarted."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from typing import Any

import pytest
import structlog
from msgspec.structs import replace

from elastic_agent.agent import events
from elastic_agent.agent.reporting import hang_judge
from elastic_agent.agent.reporting.hang_judge import HangJudge
from elastic_agent.diagnosis.hangs import Culprit, Hang, HangKind
from elastic_agent.diagnosis.records import NodeReport
from elastic_agent.monitoring.run_log import RunLog
from elastic_agent.protocol import Address, Phase, Plan, Policy, Seat, World
from tests import virtual_time

WORLD = World(
    1, (Seat("n1", "i1", "10.0.0.1", 1, 0), Seat("n2", "i2", "10.0.0.2", 1, 1)), Address("h", 1), "n1"
)
PLAN = Plan(1, 1, Phase.RUNNING, 1, "", Policy(max_restarts=1), WORLD)
BEHIND = Hang(next(iter(HangKind)), (Culprit(1, "n2", 0),), "worker n2/0 (rank 1) is one all_reduce behind")


class Reported:
    """The reports of the nodes."""

    def __init__(self, log: RunLog, *reports: NodeReport) -> None:
        self.node_id, self.log = "n1", log
        self._reports = {report.node_id: report for report in reports}

    async def gather(self, *_: object) -> dict[str, NodeReport]:
        await asyncio.sleep(2.0)
        return self._reports


@pytest.fixture(autouse=True)
def _behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_judge, "find_standstill", lambda *_: BEHIND)


def judge(
    plan: Plan, limit: str, *lengths_s: float, over_after_s: float = 20.0, known: Iterable[NodeReport] = ()
) -> list[str]:
    """Return what is logged of stalls of these lengths."""

    async def stall() -> None:
        log = RunLog("n0")
        reports = Reported(log, *known)
        log.see(plan, 0.0, "i0")
        any_reports: Any = reports
        judge = HangJudge(any_reports, lambda *_: None)
        began_s = asyncio.get_running_loop().time()
        for stalled_s in lengths_s:
            await asyncio.sleep(began_s + stalled_s - asyncio.get_running_loop().time())
            await judge.judge(
                events.Stalled(1, stalled_s, False, over_at_s=began_s + over_after_s, limit=limit)
            )

    with structlog.testing.capture_logs() as lines:
        virtual_time.run(stall())
    return [line["event"] for line in lines]


def test_the_worker_is_named_once_and_what_follows_with_the_time_left() -> None:
    assert judge(PLAN, "--hang-timeout 20", 8.0, 9.0, 16.0, over_after_s=21.0) == [
        f"no worker has made progress for {stalled}; all workers restart in {left_s} s (--hang-timeout 20) unless it "
        "goes on"
        for stalled, left_s in (
            ("8 s: worker n2/0 (rank 1) is one all_reduce behind", 11),
            ("16 s, as told above", 3),
        )
    ]


@pytest.mark.parametrize(
    ("plan", "over_after_s", "limit", "then"),
    [
        (
            replace(PLAN, charged=1),
            70.0,
            "x",
            "; the run fails, as no restart is left, in 1 min (x) unless it goes on",
        ),
        (PLAN, math.inf, "", ""),
    ],
    ids=["no restart", "no time-out"],
)
def test_what_follows_is_what_the_run_would_do(
    plan: Plan, over_after_s: float, limit: str, then: str
) -> None:
    assert judge(plan, limit, 8.0, over_after_s=over_after_s) == [
        f"no worker has made progress for 8 s: worker n2/0 (rank 1) is one all_reduce behind{then}"
    ]


def test_connections_that_other_nodes_found_to_be_blocked_are_told_once_when_nothing_progresses() -> None:
    def report(node_id: str, *blocked: str) -> NodeReport:
        return NodeReport(node_id, "i", 1, 0.0, blocked=blocked)

    found = "worker n2/0 has tried for 4 s to connect to n1"
    told = judge(PLAN, "", 8.0, 16.0, known=(report("n1", "told by this node already"), report("n2", found)))
    assert [line for line in told if not line.startswith("no worker")] == [found]
    many = [report(f"n{node}", f"{node}", f"{node} again") for node in range(2, 40)]
    assert len(judge(PLAN, "", 8.0, known=many)) == hang_judge.SHOWN_BLOCKED + 1
