"""Connections that the network blocks are logged on all nodes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from typing import Any

import pytest

from elastic_agent.agent import events
from elastic_agent.agent.reporting import blocked_connections
from elastic_agent.agent.reporting.blocked_connections import LOOK_FOR_S, SHOWN, BlockedConnections
from elastic_agent.agent.tasks import BackgroundTasks
from elastic_agent.diagnosis.records import NodeReport
from elastic_agent.protocol import Lease, Member, Policy, State
from elastic_agent.rendezvous.reports import RunReports
from elastic_agent.transport import RunView, Snapshot, StoreLostError
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


@pytest.mark.parametrize("store_answers", [True, False])
@pytest.mark.parametrize("fate", ["there", "gone", "revoked", "there in the next generation"])
def test_the_network_is_blamed_only_for_a_machine_that_is_there(
    monkeypatch: pytest.MonkeyPatch, fate: str, store_answers: bool
) -> None:
    """One that is gone stops renewing its lease, which is revoked later; the lease of another one may go on."""
    beats = itertools.count()

    class Leases:
        def __init__(self) -> None:
            self.blocked: list[str] = []

        async def read(self) -> RunReports:
            beat = next(beats)
            if not store_answers and beat in (0, 2):
                raise StoreLostError("no answer")
            members = {
                f"i{n}": Member(1, f"n{n}", f"i{n}", f"10.0.0.{n}", 1, State.RUNNING, 1, Policy())
                for n in (2, 3)
            }
            if fate == "there in the next generation" and beat > 3:
                connections.on_end(1)
            renews = fate == "there" or (fate == "there in the next generation" and beat > 3)
            theirs = Lease("i2", 5.0, beat if renews else 7, fate == "revoked" and beat > 3)
            leases = {"i2": theirs, "i3": Lease("i3", 5.0, beat)}
            if fate == "gone" and beat > 3:
                del leases["i2"]
            return RunReports(RunView(snapshot=Snapshot(members, leases)))

        def on_blocked(self, generation: int, line: str) -> None:
            self.blocked.append(line)

    connections: Any = None

    async def send() -> list[str]:
        nonlocal connections
        store: Any = Leases()
        tasks = BackgroundTasks()
        connections = BlockedConnections("n1", store, tasks)
        connections.on_blocked(events.ConnectionBlocked(1, "n1/0", "n2", "10.0.0.2", 4321, True, 4.0))
        asyncio.get_running_loop().call_later(60.0, connections.stop)
        await tasks.settle(120.0)
        return store.blocked

    lines = virtual_time.run(send())
    assert len(lines) == (fate == "there")
    assert all("n2 (10.0.0.2), port 4321" in line and "MTU" in line for line in lines)


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
