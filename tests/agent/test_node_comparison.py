"""While nodes wait for each other, they are compared now and then."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from elastic_agent.agent.reporting import node_comparison
from elastic_agent.agent.reporting.node_comparison import NodeComparison
from elastic_agent.agent.tasks import BackgroundTasks
from elastic_agent.monitoring.run_log import RunLog
from elastic_agent.protocol import Phase
from elastic_agent.rendezvous.reports import RunReports
from tests.agent.support import asynchronous
from tests.transport.support import plan


class SlowStore:
    """Answers when it is told to."""

    incarnation = "me"

    def __init__(self) -> None:
        self.store = self
        self.answers = asyncio.Event()
        self.asked = 0

    async def read(self) -> RunReports:
        self.asked += 1
        await self.answers.wait()
        return RunReports()


@asynchronous
async def test_a_plan_that_comes_during_a_comparison_begins_no_second_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_comparison, "COMPARE_AFTER_S", 0.0)
    store: Any = SlowStore()
    log, tasks = RunLog(), BackgroundTasks()
    comparison = NodeComparison(log, store, tasks)
    for version in range(1, 4):
        log.see(plan(version, phase=Phase.FORMING), 0.0)
        comparison.on_plan()
        for _ in range(10):
            await asyncio.sleep(0)
        assert store.asked == 1
    log.see(plan(4, phase=Phase.FAILED), 0.0)
    store.answers.set()
    async with asyncio.timeout(300):
        await tasks.settle(1000)
