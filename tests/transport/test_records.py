"""Nodes and the coordinator meet in a real store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from elastic_agent.protocol import encode
from elastic_agent.protocol.records import Phase, Plan, State
from elastic_agent.transport import c10d
from elastic_agent.transport.base import StoreLostError
from elastic_agent.transport.c10d import host
from elastic_agent.transport.record_reader import KEPT_BELLS
from tests.loop_thread import Blocking, in_loop
from tests.relay import Relay
from tests.waiting import wait_for

from .support import PATIENCE_S, C10dScene, Scene, beside, lease, member, plan, world


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Return the results of calls made as nearly together as threads allow."""
    gate = threading.Barrier(len(calls))

    def call(work: Callable[[], Any]) -> Any:
        gate.wait()
        return work()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(call, calls))


# -- members and leases ---------------------------------------------------------------------------


def test_a_registered_node_is_read_by_the_coordinator(scene: Scene) -> None:
    scene.joined("a", "b")
    snapshot = scene.coordinator().read(None)
    assert snapshot.members == {"a": member("a"), "b": member("b")}
    assert snapshot.leases == {"a": lease("a"), "b": lease("b")}
    assert scene.complaints == []
    assert list(scene.coordinator().read(["b", "nobody"]).members) == ["b"], "only what was asked for"


def test_a_new_member_record_replaces_the_old_one_and_leaves_a_hint(scene: Scene) -> None:
    wait = scene.hints()
    node = scene.joined("a")
    assert wait(PATIENCE_S) == ["a"]
    node.write(member("a", state=State.RUNNING))
    assert wait(PATIENCE_S) == ["a"]
    assert scene.coordinator().read(["a"]).members["a"].state is State.RUNNING


def test_a_late_write_of_an_abandoned_connection_has_no_effect(c10d_scene: C10dScene) -> None:
    """TCP delivers what was sent on it minutes later."""
    with Relay(c10d_scene.endpoint.port) as relay:
        abandoned = Blocking(in_loop(c10d.dial(relay.endpoint, "run", PATIENCE_S)))
        assert abandoned.register(member("a"), lease("a")) is not None
        relay.hold()
        late = beside(lambda: abandoned.write(member("a", state=State.RUNNING)))
        assert relay.held.wait(PATIENCE_S)
        abandoned.close()
        c10d_scene.node().write(member("a", state=State.FAILED))
        relay.release()
        with suppress(StoreLostError):
            late.result(PATIENCE_S)
    assert c10d_scene.coordinator().read(["a"]).members["a"].state is State.FAILED


def test_the_record_of_a_forgotten_incarnation_is_not_written_again(scene: Scene) -> None:
    node, coordinator = scene.joined("a"), scene.coordinator()
    coordinator.read(None)
    coordinator.forget("a")
    for link in (node, scene.node()):
        link.write(member("a", state=State.RUNNING))
        assert scene.coordinator().read(["a"]).members == {}


def test_a_lease_is_renewed_only_from_its_current_value(scene: Scene) -> None:
    node, first = scene.node(), lease("a")
    assert not node.renew(first, first.renewed())
    assert node.read_lease("a") is None, "it was never written"
    node = scene.joined("a")
    assert node.renew(first, first.renewed())
    assert not node.renew(first, first.renewed().renewed()), "that one is not there any more"
    assert node.read_lease("a") == first.renewed()
    assert scene.coordinator().read_leases(["a"]) == {"a": first.renewed()}


def test_exactly_one_of_a_concurrent_renewal_and_revocation_wins(scene: Scene) -> None:
    node, coordinator = scene.joined("a"), scene.coordinator()
    current = lease("a")
    names = iter(f"a{i}" for i in range(100))
    for _ in range(100):
        renewed, revoked = at_once(
            lambda held=current: node.renew(held, held.renewed()),
            lambda held=current: coordinator.revoke(held),
        )
        assert renewed is not revoked
        expected = current.renewed() if renewed else current.revoke()
        assert node.read_lease(current.incarnation) == expected
        current = expected
        if revoked:
            current = lease(next(names))
            node.register(member(current.incarnation), current)
    renewed_lease = current.renewed()
    assert node.renew(current, renewed_lease)
    assert not coordinator.revoke(current)
    assert coordinator.revoke(renewed_lease)
    assert not node.renew(renewed_lease, renewed_lease.renewed())


def test_a_revoked_incarnation_cannot_register_again(scene: Scene) -> None:
    node, coordinator = scene.joined("a"), scene.coordinator()
    assert coordinator.revoke(lease("a"))
    assert node.register(member("a", slots=5), lease("a")) is None
    assert coordinator.read(None).members["a"].slots == 2, "nothing of it is written"


def test_a_forgotten_incarnation_is_removed_for_good(scene: Scene) -> None:
    node, coordinator = scene.joined("a", "b"), scene.coordinator()
    coordinator.read(None)
    coordinator.forget("a")
    for reader in (coordinator, scene.coordinator()):
        assert list(reader.read(None).members) == ["b"]
        assert list(reader.read_leases(["a", "b"])) == ["b"]
        assert reader.read(["a"]).members == {}
    assert node.read_lease("a") is None
    assert not node.renew(lease("a"), lease("a").renewed())
    assert node.register(member("a"), lease("a")) is None


def test_a_lease_registered_again_differs_from_the_last(scene: Scene) -> None:
    """The coordinator counts from when it saw a change; the node counts from its second registration."""
    node = scene.joined("a")
    again = node.register(member("a"), lease("a"))
    assert again is not None
    assert again != lease("a")
    assert node.renew(again, again.renewed())
    assert scene.coordinator().read(None).members == {"a": member("a")}


def has_published(coordinator: Any, said: Plan) -> bool:
    """Return whether the coordinator was not refused."""
    try:
        coordinator.publish(said)
    except StoreLostError:
        return False
    return True


# -- plans ----------------------------------------------------------------------------------------


def test_of_several_coordinators_one_publishes_a_version(scene: Scene) -> None:
    rivals = [scene.coordinator() for _ in range(4)]
    for version in range(1, 40):
        won = at_once(
            *(
                lambda rival=rival, reason=f"by {i}", version=version: has_published(
                    rival, plan(version, reason, world=world(20))
                )
                for i, rival in enumerate(rivals)
            )
        )
        assert won.count(True) == 1
        for rival in rivals:
            assert rival.read_plan() == plan(version, f"by {won.index(True)}", world=world(20))


def test_a_waiting_node_is_woken_by_the_plan(scene: Scene) -> None:
    node, coordinator = scene.node(), scene.coordinator()
    for version in range(1, 20):
        waiting = beside(lambda after=version - 1: node.next_plan(after, 10 * PATIENCE_S))
        coordinator.publish(plan(version))
        assert waiting.result(PATIENCE_S) == plan(version)


def test_reading_a_plan_does_not_wake_nodes_that_wait_for_it(c10d_scene: C10dScene) -> None:
    """torch's server wakes a key's waiters at any compare-and-set: two nodes could keep each other awake for ever."""
    node, another = c10d_scene.stranger(), c10d_scene.node()
    key = f"{c10d_scene.root()}/bell/1"
    waiting = beside(lambda: node.wait([key], timedelta(seconds=PATIENCE_S)))
    for _ in range(5):
        assert another.next_plan(0, 0.05) is None
        assert another.read_plan() is None
    assert not waiting.done()
    c10d_scene.coordinator().publish(plan(1))
    waiting.result(PATIENCE_S)


def test_a_node_far_behind_gets_the_newest_plan_at_once(scene: Scene) -> None:
    coordinator, follower = scene.coordinator(), scene.node()
    coordinator.publish(plan(1, world=world(3, 1)))
    assert follower.next_plan(0, PATIENCE_S) is not None
    for version in range(2, 102):
        coordinator.publish(plan(version, world=world(3, version)))
    newest = plan(101, world=world(3, 101))
    assert follower.next_plan(1, PATIENCE_S) == newest
    assert scene.node().next_plan(0, PATIENCE_S) == newest


def test_a_bell_that_did_not_ring_costs_a_node_its_patience_alone(scene: Scene) -> None:
    """As when the coordinator ends between a plan and its bell."""
    coordinator, node = scene.coordinator(), scene.node()
    coordinator.publish(plan(1))
    assert node.next_plan(0, PATIENCE_S) == plan(1)
    scene.stranger().set(f"{scene.root()}/plan", encode(plan(2)))
    assert node.next_plan(1, 0.01) == plan(2)
    waiting = beside(lambda: node.next_plan(2, PATIENCE_S))
    scene.stranger().set(f"{scene.root()}/plan", encode(plan(3)))
    assert scene.coordinator().read_plan() == plan(3), "the next one, which rings it"
    assert waiting.result(PATIENCE_S) == plan(3)


def waits_of(node: Blocking, monkeypatch: pytest.MonkeyPatch, *, woken_at_first: bool) -> list[str]:
    """Return the keys for which this node waits from now on; the first wait may end at once."""
    table, waited = node.records.table, list[str]()
    wait = table.wait

    async def recorded(key: str, timeout_s: float) -> bool:
        waited.append(key)
        return (woken_at_first and len(waited) == 1) or await wait(key, timeout_s)

    monkeypatch.setattr(table, "wait", recorded)
    return waited


def test_a_node_that_is_woken_without_a_plan_misses_no_bell(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by etcd, when it has compacted the revisions that were watched."""
    coordinator, node = scene.coordinator(), scene.node()
    waited = waits_of(node, monkeypatch, woken_at_first=True)
    waiting = beside(lambda: node.next_plan(0, 10 * PATIENCE_S))
    wait_for("the second wait", lambda: len(waited) == 2)
    coordinator.publish(plan(1))
    assert waiting.result(PATIENCE_S) == plan(1)
    assert len(set(waited)) == 1


def test_a_bell_that_rang_for_no_plan_wakes_a_node_once(
    c10d_scene: C10dScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, node = c10d_scene.coordinator(), c10d_scene.node()
    c10d_scene.stranger().set(f"{c10d_scene.root()}/bell/1", b"1")
    waited = waits_of(node, monkeypatch, woken_at_first=False)
    waiting = beside(lambda: node.next_plan(0, 10 * PATIENCE_S))
    wait_for("the second wait", lambda: len(waited) == 2)
    coordinator.publish(plan(1))
    coordinator.publish(plan(2))
    assert waiting.result(PATIENCE_S) == plan(2)
    assert [key[-1] for key in waited] == ["1", "2"]


def test_a_former_coordinator_cannot_publish_an_old_version(scene: Scene) -> None:
    coordinator = scene.coordinator()
    for version in range(1, 41):
        coordinator.publish(plan(version))
    assert not has_published(scene.coordinator(), plan(3, "late"))
    assert not has_published(scene.coordinator(), plan(40, "late"))
    assert not has_published(scene.coordinator(), plan(45, "early")), "it follows nothing"
    assert scene.node().read_plan() == plan(40)


def test_one_plan_and_few_bells_stay_in_the_store(scene: Scene) -> None:
    """Also with the next coordinator."""
    scene.coordinator().publish(plan(1, world=world(30)))
    scene.forge(*(plan(version) for version in (2, 3, KEPT_BELLS, KEPT_BELLS + 1)))
    scene.coordinator().publish(plan(KEPT_BELLS + 2))
    scene.coordinator().publish(plan(KEPT_BELLS + 3))
    keys = Blocking(scene.table()).keys("r/run/")
    assert sum(key.endswith("/plan") for key in keys) == 1
    assert [key.rpartition("/")[2] for key in keys if "/bell/" in key] == [
        "1",
        *map(str, range(KEPT_BELLS, KEPT_BELLS + 4)),
    ]


# -- several runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"), [("a", "b"), ("r", "run"), ("x@y:1+2-3", "x@y:1+2"), ("a.b", "a")]
)
def test_runs_in_one_store_are_isolated(scene: Scene, first: str, second: str) -> None:
    coordinators = {run_id: scene.coordinator(run_id) for run_id in (first, second)}
    waits = {run_id: scene.hints(run_id) for run_id in (first, second)}
    nodes = {run_id: scene.joined(f"of-{i}", run_id=run_id) for i, run_id in enumerate((first, second))}
    coordinators[first].publish(plan(1, "mine"))
    coordinators[first].write_status("mine")
    assert nodes[second].read_plan() is None
    assert nodes[second].next_plan(0, 0.02) is None
    assert nodes[second].read_status() == ""
    assert not nodes[second].renew(lease("of-0"), lease("of-0").renewed())
    assert list(coordinators[first].read(None).members) == ["of-0"]
    assert list(coordinators[second].read(None).members) == ["of-1"]
    assert waits[second](PATIENCE_S) == ["of-1"]
    assert waits[first](PATIENCE_S) == ["of-0"]


def test_jobs_without_a_run_id_agree_on_one(c10d_scene: C10dScene) -> None:
    def agree(proposal: str) -> str:
        return in_loop(c10d.agree_run_id(c10d_scene.endpoint, "job", proposal, PATIENCE_S))

    agreed = at_once(*(lambda proposal=f"run-{i}": agree(proposal) for i in range(4)))
    assert len(set(agreed)) == 1
    assert agreed[0] in {"run-0", "run-1", "run-2", "run-3"}
    assert in_loop(c10d.agree_run_id(c10d_scene.endpoint, "another job", "other", PATIENCE_S)) == "other"
    in_loop(c10d.release_run_id(c10d_scene.endpoint, "job", "not this one", PATIENCE_S))
    assert agree("next") == agreed[0]
    in_loop(c10d.release_run_id(c10d_scene.endpoint, "job", agreed[0], PATIENCE_S))
    assert agree("next") == "next"


def test_agents_that_end_one_run_of_a_job_and_start_the_next_at_once_agree(c10d_scene: C10dScene) -> None:
    coordinator = c10d_scene.coordinator("run-0")

    def start_again(proposal: str) -> str:
        in_loop(c10d.release_run_id(c10d_scene.endpoint, "job", "run-0", PATIENCE_S))
        return in_loop(c10d.agree_run_id(c10d_scene.endpoint, "job", proposal, PATIENCE_S))

    for turn in range(20):
        job = Blocking(c10d_scene.table())
        job.delete(["default/job"])
        job.put("default/job", b"run-0")
        *agreed, _ = at_once(
            *(lambda proposal=f"run-{turn}-{i}": start_again(proposal) for i in range(3)),
            lambda: coordinator.remove_run(None),
        )
        assert {in_loop(c10d.agree_run_id(c10d_scene.endpoint, "job", "late", PATIENCE_S)), *agreed} == {
            agreed[0]
        }


# -- the inbox and connections ---------------------------------------------------------------------


def test_many_hints_are_read_together_and_none_is_lost_by_a_timeout(scene: Scene) -> None:
    wait = scene.hints()
    assert wait(0.02) == []
    names = {f"i{i}" for i in range(200)}
    scene.joined(*names)
    heard: set[str] = set()
    while heard != names:
        heard.update(wait(PATIENCE_S) or ["nothing"])
    assert wait(0.02) == []


def test_every_call_detects_that_the_store_is_gone(scene_to_lose: Scene) -> None:
    scene = scene_to_lose
    wait, node, coordinator = scene.hints(), scene.joined("a"), scene.coordinator()
    assert wait(PATIENCE_S) == ["a"]
    waiting = [
        beside(lambda: node.next_plan(0, 10 * PATIENCE_S)),
        beside(lambda: wait(10 * PATIENCE_S)),
    ]
    scene.lose_store()
    for call in (
        *(future.result for future in waiting),
        node.read_plan,
        lambda: node.write(member("a", state=State.LEFT)),
        lambda: node.renew(lease("a"), lease("a").renewed()),
        lambda: coordinator.publish(plan(1)),
        lambda: coordinator.revoke(lease("a")),
        lambda: coordinator.read(None),
    ):
        with pytest.raises(StoreLostError) as caught:
            call()
        assert str(caught.value).isprintable()


def test_a_closed_link_raises_an_error(scene: Scene) -> None:
    node = scene.node()
    node.close()
    with pytest.raises(StoreLostError, match="closed"):
        node.read_plan()


@pytest.mark.parametrize("call", [c10d.agree_run_id, c10d.release_run_id])
def test_a_call_about_a_job_that_is_given_up_leaves_no_connection(
    call: Callable[..., Coroutine[Any, Any, object]], c10d_scene: C10dScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        used: asyncio.Future[c10d.C10dTable] = asyncio.get_running_loop().create_future()

        async def swap(table: c10d.C10dTable, *_: object) -> None:
            used.set_result(table)
            await asyncio.Event().wait()

        monkeypatch.setattr(c10d.C10dTable, "swap", swap)
        calling = asyncio.create_task(call(c10d_scene.endpoint, "job", "run", PATIENCE_S))
        table = await used
        calling.cancel()
        await asyncio.wait([calling])
        with pytest.raises(StoreLostError, match="the connection was closed"):
            await table.read(["key"])

    in_loop(story())


def test_an_inbox_that_is_not_completed_leaves_no_connection(
    c10d_scene: C10dScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        clients, is_waiting = list[Any](), asyncio.Event()

        async def reach_once(*args: Any) -> Any:
            if clients:
                is_waiting.set()
                await asyncio.Event().wait()
            clients.append(await c10d.reach(*args))
            return clients[0]

        monkeypatch.setattr(host, "reach", reach_once)
        opening = asyncio.create_task(c10d_scene.host.inbox())
        await is_waiting.wait()
        opening.cancel()
        await asyncio.wait([opening])
        with pytest.raises(StoreLostError, match="the connection was closed"):
            await clients[0].get(["key"])

    in_loop(story())


# -- reports ---------------------------------------------------------------------------------------


def test_a_node_reads_everything_that_is_known_of_the_run(scene: Scene) -> None:
    scene.joined("a", "b")
    scene.coordinator().publish(plan(1))
    scene.coordinator().write_status("waiting for 1 more node")
    scene.reports().write_report("node-a", b"one")
    scene.reports().write_report("node-a", b"another")
    view = scene.reports().read_run()
    assert view.plan == plan(1)
    assert view.status == "waiting for 1 more node"
    assert view.snapshot.members == {"a": member("a"), "b": member("b")}
    assert view.snapshot.leases == {"a": lease("a"), "b": lease("b")}
    assert view.reports == {"node-a": b"another"}


def test_reports_can_be_read_when_the_run_was_removed(scene: Scene) -> None:
    scene.joined("a")
    scene.reports().write_report("node-a", b"the last words")
    scene.end_run()
    view = scene.reports().read_run()
    assert view.snapshot.members == {}
    assert view.reports == {"node-a": b"the last words"}


def test_other_runs_that_wait_for_their_first_nodes_are_known_to_each_other(c10d_scene: C10dScene) -> None:
    for run_id, phase in (("job", Phase.FORMING), ("job-2", Phase.FORMING), ("old", Phase.FINISHED)):
        c10d_scene.joined(f"{run_id}-node", run_id=run_id)
        c10d_scene.coordinator(run_id).publish(replace(plan(1), phase=phase, world=None))
    waiting = c10d_scene.reports("job").read_waiting_runs()
    assert {run_id: [*snapshot.members] for run_id, snapshot in waiting.items()} == {"job-2": ["job-2-node"]}


def test_notes_are_replaced_and_removed_and_may_expire(scene: Scene) -> None:
    asks, answers = scene.reports(), scene.reports()
    asks.change_note("asked/a", lambda data: b"of a")
    asks.change_note("asked/b", lambda data: b"of b")
    answers.change_note("asked/a", lambda data: (data or b"") + b" and more")
    answers.write_note("told/1", b"answer", 60.0)
    names = ["asked/a", "asked/b", "asked/c", "told/1"]
    found = {"asked/a": b"of a and more", "asked/b": b"of b", "told/1": b"answer"}
    assert answers.read_notes(names) == found
    asks.remove_notes(["told/1", "told/2"])
    assert answers.read_notes(names) == {name: found[name] for name in ("asked/a", "asked/b")}
    assert dict(asks.read_run().reports) == {}
