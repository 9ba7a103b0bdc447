"""The nodes of a run that has failed read each other's reports before the store ends with its host."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from elastic_agent.agent import events
from elastic_agent.agent.local_node import LocalNode
from elastic_agent.agent.reporting.node_reports import NodeReports
from elastic_agent.agent.reporting.run_observer import RunObserver
from elastic_agent.agent.reporting.status_files import saved_statuses
from elastic_agent.agent.supervisor import Supervisor
from elastic_agent.agent.tasks import BackgroundTasks
from elastic_agent.agent.worker_group.collectives import Collectives
from elastic_agent.diagnosis.records import NodeReport, WorkerReport, WorkerState
from elastic_agent.monitoring.run_log import RunLog
from elastic_agent.monitoring.status import RunStatus
from elastic_agent.monitoring.status_text import status_text
from elastic_agent.protocol import Failure, FailureKind, Outcome, Phase, Plan
from elastic_agent.rendezvous.events import Connected, Disconnected, LeaseLost, PlanSeen
from elastic_agent.rendezvous.reports import Reports, RunReports
from elastic_agent.transport import Obstacle, RunView, Snapshot, StoreLostError, c10d
from tests import virtual_time
from tests.agent.support import asynchronous, elastic_agent
from tests.transport.support import C10dScene, member, plan, world
from tests.waiting import GUARD_S

FAILURE = Failure(FailureKind.WORKER, "worker n1/0 exited with code 1", slot=0, returncode=1)
ENDS = {
    "at once": (plan(2, phase=Phase.FAILED, generation=2, failure=FAILURE, failed_node="n1"),),
    "after another attempt to form a world": (
        plan(2, phase=Phase.FORMING, generation=2, failure=FAILURE, failed_node="n1"),
        plan(3, phase=Phase.FAILED, generation=2, failure=FAILURE, failed_node="n1"),
    ),
}


@pytest.fixture
def scene() -> Iterator[C10dScene]:
    scene = C10dScene()
    yield scene
    scene.host.close()


def reports_of(scene: C10dScene) -> Reports:
    return Reports(lambda: c10d.dial_reports(scene.endpoint, "run", GUARD_S))


def observer(scene: C10dScene, node_id: str, state_dir: Path, *, is_host: bool = False) -> RunObserver:
    async def members() -> dict[str, str]:
        return {}

    backend = SimpleNamespace(
        shown="127.0.0.1",
        is_host=is_host,
        members=members,
        connect_reports=lambda: c10d.dial_reports(scene.endpoint, "run", GUARD_S),
    )
    node = SimpleNamespace(
        run_id="run",
        node_id=node_id,
        depending=lambda: ("n1",) if is_host else (),
        backend=backend,
        settings=SimpleNamespace(state_dir=state_dir, script_args=()),
        workers=SimpleNamespace(log_dir=lambda run_id: ""),
        console=SimpleNamespace(remedy=""),
        publish=events.Publisher(),
    )
    supervisor = SimpleNamespace(
        progress=None,
        runner=SimpleNamespace(hang=None),
        world=None,
        node=SimpleNamespace(incarnation="unknown"),
    )
    observer = RunObserver(cast(LocalNode, node), cast(Supervisor, supervisor), Collectives(), goes_on=False)
    observer.on_event(PlanSeen(plan(1, phase=Phase.RUNNING, world=world(2))))
    return observer


async def saved(state_dir: Path, phase: str = "") -> RunStatus:
    """Return the status that is saved, when its phase is this one."""
    async with asyncio.timeout(GUARD_S):
        while not (found := [saved for saved in saved_statuses(state_dir) if phase in ("", saved.phase)]):
            await asyncio.sleep(0)
    return found[0]


@asynchronous
async def test_the_last_plan_of_a_new_store_counts_though_versions_were_higher_in_the_old_one(
    scene: C10dScene, tmp_path: Path
) -> None:
    known = observer(scene, "n0", tmp_path)
    older = plan(40, phase=Phase.RUNNING, generation=6, world=world(2, 6))
    known._last_view = replace(known._last_view, view=replace(known._last_view.view, plan=older))
    known.on_event(Connected("another store", replaced=True))
    known.on_event(PlanSeen(plan(3, phase=Phase.RUNNING, generation=7, world=world(2, 7))))
    known.on_event(PlanSeen(plan(4, phase=Phase.STOPPED, generation=7)))
    await known.conclude(Outcome.STOPPED, "")
    last = await saved(tmp_path, "stopped")
    known.close()
    assert last.generation == 7


@asynchronous
async def test_what_this_machine_knows_of_its_network_stays_the_reason_of_an_outage(
    scene: C10dScene, tmp_path: Path
) -> None:
    away = observer(scene, "n0", tmp_path)
    for reason, obstacle in (
        ("no answer within 1 s", Obstacle.NO_ANSWER),
        ("eth0 has no link", Obstacle.OWN_NETWORK),
        ("no answer within 1 s", Obstacle.NO_ANSWER),
    ):
        away.on_event(Disconnected(reason, obstacle))
    said = await away.status(within_s=0.0)
    away.close()
    assert said.problem == "eth0 has no link"


def fails(watching: RunObserver, plans: tuple[Plan, ...], end: WorkerReport) -> None:
    for seen in plans:
        watching.on_event(PlanSeen(seen))
    watching.on_event(events.GenerationEnded(1, (end,), {}))


@pytest.mark.parametrize("plans", ENDS.values(), ids=ENDS.keys())
@asynchronous
async def test_the_host_waits_until_the_others_have_read_its_report(
    scene: C10dScene, tmp_path: Path, plans: tuple[Plan, ...]
) -> None:
    ended = WorkerReport(0, 0, WorkerState.FAILED, 1, 1, 1.0, error="KeyError: 'learning_rate'")
    host, other = (observer(scene, node_id, tmp_path) for node_id in ("n0", "n1"))
    store = reports_of(scene)

    async def until_reported(*nodes: str) -> None:
        while {report.node_id for report in (await store.read()).reports if report.is_final} != {*nodes}:
            await asyncio.sleep(0)

    async with asyncio.timeout(GUARD_S):
        fails(host, plans, ended)
        waiting = asyncio.create_task(host.others_have_read(2 * GUARD_S))
        await until_reported("n0")
        assert not waiting.done()
        fails(other, plans, ended)
        await waiting
        read = {report.node_id for report in (await store.read()).reports if report.has_read}
    for each in (host, other):
        each.close()
    store.close()
    assert "n1" in read


@asynchronous
async def test_where_an_agent_serves_the_store_after_its_node_has_left_users_are_told_not_to_end_it(
    scene: C10dScene, tmp_path: Path
) -> None:
    host = observer(scene, "n0", tmp_path, is_host=True)
    await host.conclude(Outcome.DRAINED, "SIGINT received")
    await saved(tmp_path)
    host.close()
    for command in ("status", "why"):
        said = elastic_agent(command, "run", "--state-dir", str(tmp_path)).stdout
        assert re.search(
            r"node n0 left the run .* ago, and its agent stayed to serve the store to n1: keep it and its machine "
            r"running; if it has ended while the run goes on, start the same command there again\n$",
            said,
        ), said


@asynchronous
async def test_a_node_that_was_away_tells_no_history_that_it_has_not_seen(
    scene: C10dScene, tmp_path: Path
) -> None:
    away = observer(scene, "n2", tmp_path)
    away.on_event(LeaseLost("it was not renewed in time", unanswered=True))
    away.on_event(PlanSeen(plan(3, phase=Phase.RUNNING, generation=2, world=world(2, 2))))
    lines = status_text(await away.status()).splitlines()
    away.close()
    first, second = (next(line for line in lines if line.startswith(number)) for number in ("1  ", "2  "))
    assert first.endswith(
        "  -        2 nodes, 4 workers  not seen on this machine; run elastic-agent why on n0"
    )
    assert "before" in second
    assert "running, 2 nodes" in lines[0]


class NewStore(Reports):
    """A store that was restarted with the agent of n0, in which n2 registers a little later than n1."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.is_of_old_store = False
        members = {name: member(name, node_id=node_id) for name, node_id in (("i9", "n0"), ("i1-1", "n1"))}
        without = RunReports(RunView(snapshot=Snapshot(members=members)))
        end = WorkerReport(0, 4, WorkerState.FAILED, error="boom")
        late = NodeReport("n2", "i2-1", 1, 1.0, workers=(end,), is_final=True)
        self.views = [replace(without, reports=(late,)), without, without]

    async def write(self, node_id: str, reports: Sequence[NodeReport]) -> None:
        if self.is_of_old_store:
            raise StoreLostError("the connection broke")
        self.written += [node_id] * len(reports)

    def close(self) -> None:
        self.is_of_old_store = False

    async def read(self) -> RunReports:
        return self.views.pop() if len(self.views) > 1 else self.views[0]


def test_in_a_new_store_the_reports_of_nodes_that_have_yet_to_register_are_awaited() -> None:
    async def gathered() -> tuple[set[str], list[str]]:
        store, last, tasks = NewStore(), world(3), BackgroundTasks()
        log = RunLog("n0")
        log.see(plan(1, phase=Phase.RUNNING, world=last), 0.0, "i0-1")
        supervisor = SimpleNamespace(progress=None, node=SimpleNamespace(incarnation="i1-1"))
        node = NodeReports("n1", store, cast(Supervisor, supervisor), log, {}, "", tasks)
        node.on_ended(events.GenerationEnded(1, (), {}))
        await tasks.settle(GUARD_S)
        store.written.clear()
        store.is_of_old_store = True
        node.on_new_store()
        found = await node.gather(1, last, lambda report: report.is_final, GUARD_S)
        return {*found}, store.written

    assert virtual_time.run(gathered()) == ({"n1", "n2"}, ["n1"])
