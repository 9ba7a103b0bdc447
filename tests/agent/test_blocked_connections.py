"""Connections that the network blocks are logged on all nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from elastic_agent.agent import events
from elastic_agent.agent.reporting import blocked_connections
from elastic_agent.agent.reporting.blocked_connections import LOOK_FOR_S, SHOWN, BlockedConnections
from elastic_agent.agent.tasks import BackgroundTasks
from elastic_agent.diagnosis.records import NodeReport
from elastic_agent.rendezvous.reports import RunReports
from tests import virtual_time


class Store:
    """Holds reports."""

    def __init__(self, reports: Iterable[NodeReport]) -> None:
        self._reports = tuple(reports)

    async def read(self) -> RunReports:
        return RunReports(reports=self._reports)


def logged(monkeypatch: pytest.MonkeyPatch, *reports: NodeReport) -> list[str]:
    """What node n1 logs when its workers stall."""
    lines: list[str] = []

    class Log:
        def warning(self, line: str) -> None:
            lines.append(line)

    async def stall() -> None:
        store: Any = Store(reports)
        tasks = BackgroundTasks()
        BlockedConnections("n1", store, tasks).on_stall(events.Stalled(1, 8.0, False))
        await tasks.settle(2 * LOOK_FOR_S)

    monkeypatch.setattr(blocked_connections, "get_logger", Log)
    virtual_time.run(stall())
    return lines


def report(node: str, *blocked: str, generation: int = 1) -> NodeReport:
    return NodeReport(node, "i", generation, 0.0, blocked=blocked)


def test_what_other_nodes_report_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    others = report("n2", "worker n2/0 has tried"), report("n3"), report("n2", "before", generation=0)
    assert logged(monkeypatch, report("n1", "this node's own"), *others) == ["worker n2/0 has tried"]


def test_many_blocked_connections_do_not_fill_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = logged(monkeypatch, *(report(f"n{node}", f"{node}", f"{node} again") for node in range(2, 40)))
    assert len(lines) == SHOWN + 1
    assert "elastic-agent doctor" in lines[-1]


def test_looking_ends_with_the_run() -> None:
    async def end() -> float:
        loop = asyncio.get_running_loop()
        store: Any = Store(())
        tasks = BackgroundTasks()
        watch = BlockedConnections("n1", store, tasks)
        watch.on_stall(events.Stalled(1, 8.0, False))
        await asyncio.sleep(0)
        watch.stop()
        stopped_s = loop.time()
        await tasks.settle(60.0)
        return loop.time() - stopped_s

    assert virtual_time.run(end()) == 0.0
