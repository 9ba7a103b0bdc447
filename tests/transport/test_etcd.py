"""Checks what only etcd does: terms of office, compaction, restarts, leases of its own, and what is left of a run."""

from __future__ import annotations

import asyncio
import resource
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_agent.protocol.records import Phase, State
from elastic_agent.rendezvous.backends.etcd.backend import Members
from elastic_agent.rendezvous.backends.etcd.election import keep_leading
from elastic_agent.rendezvous.waits import Signal
from elastic_agent.transport import NodeRecords, UnknownPlanError
from elastic_agent.transport.base import NotAStoreError, StoreLostError
from elastic_agent.transport.etcd import EtcdTable, KeptLease, NotLeaderError
from elastic_agent.transport.etcd import table as table_module
from elastic_agent.transport.etcd.api import prefix_end
from elastic_agent.transport.etcd.client import EtcdClient, News
from elastic_agent.transport.etcd.leadership import campaign_for
from elastic_agent.values import EtcdAccess
from tests.etcd import EtcdCluster
from tests.loop_thread import Blocking, in_loop
from tests.protocol.support import on_disk
from tests.relay import Relay
from tests.waiting import wait_for

from .etcd_scene import LEASE_TTL_S, EtcdScene, Term, begin, campaign, client_of, endpoint_of, first_change
from .support import PATIENCE_S, lease, member, plan


def everything(scene: EtcdScene) -> dict[bytes, tuple[bytes, int]]:
    """Return what lies under the scene's prefix, with the revision in which it was written."""
    prefix = scene.access.prefix.encode()
    found = scene.client().range(prefix, prefix_end(prefix))
    return {kv.key: (kv.value, kv.mod_revision) for kv in found.kvs}


ENDED = on_disk(generation=4, charged=1, outcome=Phase.FINISHED, settled=True)

# -- the term of office ---------------------------------------------------------------------------

WRITES: dict[str, Callable[[Term], object]] = {
    "publish": lambda term: term.publish(plan(2, "from the past")),
    "condemn": lambda term: term.revoke(lease("a")),
    "forget": lambda term: term.forget("a"),
    "write_status": lambda term: term.write_status("from the past"),
    "remove_run": lambda term: term.remove_run(ENDED),
}


@pytest.mark.parametrize("succeeded", [True, False])
@pytest.mark.parametrize("write", WRITES)
def test_a_former_leader_cannot_write(etcd_scene: EtcdScene, write: str, succeeded: bool) -> None:
    etcd_scene.joined("a")
    deposed = etcd_scene.leadership()
    deposed.publish(plan(1))
    etcd_scene.client().revoke(lease_of(deposed))  # as when it ran out
    if succeeded:
        etcd_scene.leadership()
    before = everything(etcd_scene)
    found = "a test is now the coordinator" if succeeded else "leader key no longer"
    with pytest.raises(NotLeaderError, match=found):
        WRITES[write](deposed)
    assert everything(etcd_scene) == before


def lease_of(term: Term) -> int:
    """Return the etcd lease of the leader key."""
    office: Any = term.leadership
    lease_id: int = office.lease_id
    return lease_id


@pytest.mark.parametrize("leads", [True, False])
def test_an_agent_that_was_paused_for_longer_than_its_etcd_lease_is_not_elected(
    etcd_scene: EtcdScene, monkeypatch: pytest.MonkeyPatch, leads: bool
) -> None:
    if leads:
        etcd_scene.leadership()
    client, keys = etcd_scene.client(), etcd_scene.life_keys()
    gone = client.grant(60)
    client.revoke(gone)

    async def grant(ttl_s: int) -> int:
        return int(gone)

    monkeypatch.setattr(client.records, "grant", grant)
    assert in_loop(campaign_for(client.records, etcd_scene.prefix, keys, "late", LEASE_TTL_S)) is None


def test_leadership_of_a_partitioned_agent_ends_and_another_takes_over(etcd_scene: EtcdScene) -> None:
    etcd_scene.node()
    with Relay(etcd_scene.cluster.members[0].client_port) as relay:
        client = in_loop(EtcdClient.dial(relay.endpoint, etcd_scene.access, PATIENCE_S))
        cut_off = in_loop(campaign(client, etcd_scene.prefix, "cut off", LEASE_TTL_S, 0.1))
        assert cut_off is not None
        relay.hold()
        client_of(cut_off).timeout_s = 0.2
        etcd_scene.client().revoke(lease_of(cut_off))  # as when it ran out
        etcd_scene.leadership().publish(plan(1))
        assert "not renewed" in why_it_ends(cut_off)
    cut_off.resign()


def why_it_ends(term: Term) -> str:
    """Return what its holder finds out when the leader key's time is over by the holder's own clock."""
    elected_s = time.monotonic() - term.leadership.ttl_s
    why: str = in_loop(keep_leading(term.leadership, Signal(), time.monotonic, elected_s))
    return why


def test_a_leader_detects_a_lost_etcd_lease(etcd_scene: EtcdScene) -> None:
    leadership = etcd_scene.leadership()
    etcd_scene.client().revoke(lease_of(leadership))
    assert "expired" in why_it_ends(leadership)


# -- by when a lease was written -------------------------------------------------------------------


def test_a_successor_dates_leases_by_the_leaders_marks(
    etcd_scene: EtcdScene,
) -> None:
    """The lease of the coordinator's own node is first read by its successor, some time after its last renewal."""
    first, root, client = etcd_scene.leadership(), etcd_scene.prefix, etcd_scene.client()
    standing = begin(campaign(client.records, root, "next", LEASE_TTL_S, 10 * PATIENCE_S))
    client.range(b"/")  # an answer before the lease is written tells nothing of it
    node = etcd_scene.joined("a")
    before_s = time.monotonic()
    assert node.renew(lease("a"), lease("a").renewed())
    revision = int(etcd_scene.client().get(etcd_scene.key(etcd_scene.life_keys().lease("a"))).mod_revision)
    first.write_mark()
    wait_for("the mark", lambda: client.written_by(revision) is not None)
    marked_s = time.monotonic()
    first.resign()
    successor = standing.result(PATIENCE_S)
    assert successor is not None
    found = successor.read(None)
    read_s = time.monotonic()
    assert before_s <= found.written_s["a"] <= marked_s < read_s
    assert successor.read(["a"]).written_s == found.written_s
    node.renew(lease("a").renewed(), lease("a").renewed().renewed())
    assert successor.read(None).written_s["a"] >= read_s, "the renewal is newer than all that was told"
    successor.resign()


def test_a_renewal_is_reported_to_its_agent(etcd_scene: EtcdScene) -> None:
    renewals: list[bool] = []
    opened = NodeRecords.open(etcd_scene.table(), "run", on_renewal=lambda: renewals.append(True))
    node = Blocking(in_loop(opened))
    assert node.register(member("a"), lease("a")) is not None
    node.write(member("a", slots=3))
    assert node.renew(lease("a"), lease("a").renewed())
    assert not node.renew(lease("a"), lease("a").renewed().renewed())
    assert len(renewals) == 2


def test_revisions_of_an_etcd_that_lost_its_data_do_not_date_the_next_one(own_etcd: EtcdCluster) -> None:
    members = Members(endpoint_of(own_etcd), EtcdAccess("/tests"), PATIENCE_S)
    client = in_loop(members.dial())
    revision = int(in_loop(client.range(b"/")).header.revision)
    assert client.written_by(revision) is not None
    own_etcd.ctl("del", "--prefix", "/")
    again = in_loop(members.dial())
    assert again.written_by(revision) is None
    for dialled in (client, again):
        Blocking(dialled).close()


# -- compaction -----------------------------------------------------------------------------------


def compact(scene: EtcdScene) -> None:
    """Forget all revisions but the newest."""
    scene.cluster.ctl("compact", str(scene.client().range(b"/").header.revision))


class Behind:
    """Has each of a client's next watches begin only after something happened."""

    def __init__(self, client: Any, *meanwhile: Callable[[], object]) -> None:
        self._follow, self._meanwhile = client.follow, list(meanwhile)
        self.watches = 0
        client.follow = self.follow

    async def follow(self, *args: Any) -> AsyncGenerator[News]:
        self.watches += 1
        if self._meanwhile:
            await asyncio.to_thread(self._meanwhile.pop(0))
        async with aclosing(self._follow(*args)) as changes:
            async for news in changes:
                yield news


def test_a_node_behind_a_compaction_reads_the_plan_again(etcd_scene: EtcdScene) -> None:
    node, coordinator = etcd_scene.node(), etcd_scene.coordinator()
    coordinator.publish(plan(1))

    def pass_by() -> None:
        coordinator.publish(plan(2))
        coordinator.publish(plan(3))
        compact(etcd_scene)

    behind = Behind(client_of(node), pass_by)
    assert node.next_plan(1, PATIENCE_S) == plan(3)
    assert behind.watches == 1


def test_a_compaction_without_changes_is_no_event_and_no_busy_loop(etcd_scene: EtcdScene) -> None:
    node, coordinator = etcd_scene.node(), etcd_scene.coordinator()
    coordinator.publish(plan(1))

    def pass_by() -> None:
        for _ in range(3):
            coordinator.write_status("nothing new")
        compact(etcd_scene)

    behind = Behind(client_of(node), pass_by, lambda: coordinator.publish(plan(2)))
    assert node.next_plan(1, PATIENCE_S) == plan(2)
    assert behind.watches == 2


def test_a_coordinator_behind_a_compaction_gets_every_node_once(etcd_scene: EtcdScene) -> None:
    coordinator = etcd_scene.coordinator()
    node = etcd_scene.joined("a", "b")
    node.write(member("a", slots=3))
    compact(etcd_scene)
    assert sorted(coordinator.wait(PATIENCE_S)) == ["a", "b"]
    assert coordinator.wait(0.02) == []
    node.write(member("b", slots=3))
    assert coordinator.wait(PATIENCE_S) == ["b"]


def test_an_agent_behind_a_compaction_checks_for_a_leader_again(
    etcd_scene: EtcdScene,
) -> None:
    first, client = etcd_scene.leadership(), etcd_scene.dial()

    def pass_by() -> None:
        for _ in range(3):
            first.write_status("in office")
        first.resign()
        compact(etcd_scene)

    Behind(client, pass_by)
    leadership = in_loop(campaign(client, etcd_scene.prefix, "behind", LEASE_TTL_S, PATIENCE_S))
    assert leadership is not None
    leadership.publish(plan(1))
    leadership.resign()


# -- restarts -------------------------------------------------------------------------------------


def test_after_a_restart_of_etcd_the_run_continues(own_etcd_scene: EtcdScene) -> None:
    scene = own_etcd_scene
    node = scene.joined("a")
    coordinator = scene.coordinator()
    coordinator.publish(plan(1))
    waiting = begin(node.records.next_plan(1, 10 * PATIENCE_S))
    assert coordinator.wait(0.01) == []
    (server,) = scene.cluster.members
    server.kill()
    with pytest.raises(StoreLostError) as caught:
        waiting.result(PATIENCE_S)
    assert "\n" not in str(caught.value)
    with pytest.raises(StoreLostError):
        node.renew(lease("a"), lease("a").renewed())
    server.start()
    scene.cluster.wait_ready()
    again = scene.node()
    assert again.store_id == node.store_id
    assert again.read_plan() == plan(1)
    assert again.read_lease("a") == lease("a")
    assert again.renew(lease("a"), lease("a").renewed())
    scene.coordinator().publish(plan(2))  # the office is still its own
    assert again.next_plan(1, PATIENCE_S) == plan(2)


def test_a_cancelled_call_ends_as_such_and_the_connection_goes_on(etcd_scene: EtcdScene) -> None:
    client = etcd_scene.dial()

    async def cancel_each() -> None:
        for work in (client.get(b"/"), first_change(client, b"/", 0)):
            task = asyncio.create_task(work)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await client.get(b"/") is None
        task = asyncio.create_task(client.get(b"/"))
        await asyncio.sleep(0)
        task.cancel()
        client.close()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(StoreLostError, match="closed"):
            await client.get(b"/")

    in_loop(cancel_each())


def test_an_etcd_that_lost_its_data_has_another_name(own_etcd_scene: EtcdScene) -> None:
    scene = own_etcd_scene
    node = scene.joined("a")
    scene.cluster.ctl("del", "--prefix", "/")
    again = scene.node()
    assert again.store_id != node.store_id
    assert again.register(member("a"), lease("a")) == lease("a")


def test_foreign_data_under_the_prefix_is_not_touched(etcd_scene: EtcdScene) -> None:
    stranger = etcd_scene.stranger()
    stranger.set(f"{etcd_scene.access.prefix}/1/id", b"\x1b[2J no name\n")
    with pytest.raises(NotAStoreError, match="give another --etcd-prefix") as caught:
        etcd_scene.node()
    assert str(caught.value).isprintable()
    stranger.delete_key(f"{etcd_scene.access.prefix}/1/id")
    assert set(everything(etcd_scene)) == {f"{etcd_scene.access.prefix}/1/id".encode()}


# -- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"\xff", b"{}", b'{"plan": 1}'])
def test_what_is_not_a_plan_is_reported_and_not_replaced(etcd_scene: EtcdScene, data: bytes) -> None:
    """Nodes may know a plan that was there before, and ignore all that begin at version 1 again."""
    first = etcd_scene.leadership()
    first.publish(plan(1))
    etcd_scene.stranger().set(f"{etcd_scene.root()}/plan", data)
    first.resign()
    with pytest.raises(
        UnknownPlanError, match=f"what {etcd_scene.root()}/plan in the store holds is not a plan"
    ) as caught:
        etcd_scene.leadership().read_plan()
    assert "\n" not in str(caught.value)
    node = etcd_scene.joined("a")
    assert node.read_plan() is None
    assert node.renew(lease("a"), lease("a").renewed()), "those who train go on"


def test_an_empty_value_counts_as_missing(etcd_scene: EtcdScene) -> None:
    stranger, table = etcd_scene.stranger(), Blocking(etcd_scene.table())
    stranger.set(f"{etcd_scene.prefix}x/empty", b"")
    assert table.read(["x/empty"]) == table.read_folders("x/") == {}
    assert table.swap("x/empty", b"else", b"new") is None
    assert table.swap("x/empty", None, b"new") == b"new"
    assert table.read_folders("x/") == {"x/empty": b"new"}


# -- leases of etcd -------------------------------------------------------------------------------


@pytest.mark.prove  # other tests of this process use memory, too
def test_the_memory_of_an_agent_does_not_grow_with_its_keep_alives(etcd_scene: EtcdScene) -> None:
    client = etcd_scene.dial()
    lease_id = in_loop(client.grant(60))

    async def grown(calls: int) -> int:
        before = resident_bytes()
        for _ in range(calls):
            await client.keep_alive(lease_id)
        return resident_bytes() - before

    in_loop(grown(500))
    assert in_loop(grown(2000)) < 2000 * 1000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_records_whose_etcd_lease_ends_are_removed_by_etcd(etcd_scene: EtcdScene) -> None:
    node, client = etcd_scene.joined("a"), etcd_scene.client()
    keys = etcd_scene.life_keys()
    assert node.renew(lease("a"), lease("a").renewed())
    client.revoke(etcd_scene.lease_id())  # as when no keep-alive came in its time
    assert client.get(etcd_scene.key(keys.member("a"))) is None
    assert client.get(etcd_scene.key(keys.lease("a"))) is None
    assert not node.renew(lease("a").renewed(), lease("a").renewed().renewed())
    node.write(member("a", state=State.LEFT))
    found = client.get(etcd_scene.key(keys.member("a")))
    assert found is None, "a member record alone does not register a node"
    assert node.register(member("a"), lease("a")) == lease("a")


def test_the_life_of_a_run_outlasts_the_node_that_began_it(etcd_scene: EtcdScene) -> None:
    first, client = etcd_scene.joined("a"), etcd_scene.client()
    client.revoke(etcd_scene.lease_id())
    assert etcd_scene.node().store_id == first.store_id


def test_revoked_leases_keep_their_etcd_lease_and_forgotten_ones_get_another(etcd_scene: EtcdScene) -> None:
    etcd_scene.joined("a", "b")
    coordinator, client, keys = etcd_scene.coordinator(), etcd_scene.client(), etcd_scene.life_keys()
    assert coordinator.revoke(lease("a"))
    coordinator.forget("b")
    client.revoke(etcd_scene.lease_id())
    assert coordinator.read_leases(["a"]) == {}
    assert client.get(etcd_scene.key(keys.lease("a"))) is None
    assert client.get(etcd_scene.key(keys.lease("b"))).lease != 0
    assert etcd_scene.node().register(member("b"), lease("b")) is None


def test_writes_of_a_node_keep_its_records_alive(
    etcd_scene: EtcdScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_s = [0.0]
    monkeypatch.setattr(table_module, "time", SimpleNamespace(monotonic=lambda: clock_s[0]))
    client = etcd_scene.dial()
    kept_alive: list[int] = []
    keep_alive = client.keep_alive

    async def noted_keep_alive(lease_id: int) -> None:
        kept_alive.append(lease_id)
        await keep_alive(lease_id)

    monkeypatch.setattr(client, "keep_alive", noted_keep_alive)
    kept = KeptLease.of_node(LEASE_TTL_S)
    table = EtcdTable(client, etcd_scene.prefix, lease=kept)
    in_loop(table.swap("x", None, b"1"))
    first = in_loop(kept.id(client))
    clock_s[0] = LEASE_TTL_S - 1.0
    in_loop(table.swap("x", b"1", b"2"))
    assert kept_alive == []
    clock_s[0] = LEASE_TTL_S + 1.0
    in_loop(table.swap("x", b"2", b"3"))
    assert (in_loop(kept.id(client)), kept_alive) == (first, [first])
    in_loop(client.revoke(first))
    assert in_loop(table.read(["x"])) == {}
    clock_s[0] = 2 * LEASE_TTL_S + 2.0
    in_loop(table.put("x", b"4"))
    assert in_loop(client.get(etcd_scene.key("x"))).lease == in_loop(kept.id(client)) != first


# -- the end --------------------------------------------------------------------------------------


def test_a_finished_run_is_removed_completely_and_other_runs_stay(etcd_scene: EtcdScene) -> None:
    scene = etcd_scene
    node = scene.joined("a", "b", "c")
    other = scene.joined("a", run_id="run2")
    leadership = scene.leadership()
    leadership.publish(plan(1))
    leadership.write_status("nothing to wait for")
    leadership.revoke(lease("b"))
    leadership.forget("b")
    before = {key for key in everything(scene) if key.startswith(scene.key("r/run2/"))}
    leadership.remove_run(ENDED)
    leadership.resign()
    node.write(member("a", state=State.LEFT))
    with pytest.raises(StoreLostError, match="removed the records of the earlier run"):
        node.renew(lease("a"), lease("a").renewed())
    left = {scene.key("id"), scene.key("r/run/ended")}
    assert set(everything(scene)) == {*left, *before}
    assert other.read_lease("a") == lease("a")


def test_an_agent_that_missed_the_end_of_its_run_finds_the_next_one(
    etcd_scene: EtcdScene,
) -> None:
    """As in a new store: plan versions restart."""
    sleeper = etcd_scene.joined("a")
    leadership = etcd_scene.leadership()
    leadership.publish(plan(1))
    leadership.remove_run(ENDED)
    leadership.resign()
    for attempt in (
        lambda: sleeper.renew(lease("a"), lease("a").renewed()),
        lambda: sleeper.register(member("a"), lease("a")),
        lambda: sleeper.register(member("a2"), lease("a2")),
    ):
        with pytest.raises(StoreLostError, match="removed the records of the earlier run"):
            attempt()
    next_run = etcd_scene.node()
    assert next_run.store_id != sleeper.store_id
    assert next_run.store_id == etcd_scene.node().store_id, "the nodes of one life agree on its name"
    assert next_run.register(member("b"), lease("b")) is not None
    with pytest.raises(StoreLostError, match="removed the records of the earlier run"):
        sleeper.register(member("a2"), lease("a2"))
    assert list(etcd_scene.coordinator().read(None).members) == ["b"]


def test_a_removed_run_has_no_coordinator_until_a_node_registers(
    etcd_scene: EtcdScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, root = etcd_scene.leadership(), etcd_scene.prefix
    first.remove_run(ENDED)
    first.resign()
    assert in_loop(campaign(etcd_scene.dial(), root, "sleeper", LEASE_TTL_S, 0.05)) is None
    client, waits = etcd_scene.dial(), threading.Event()
    follow = client.follow

    def announced(*args: Any) -> Any:
        waits.set()
        return follow(*args)

    monkeypatch.setattr(client, "follow", announced)
    standing = begin(campaign(client, root, "sleeper", LEASE_TTL_S, 10 * PATIENCE_S))
    assert waits.wait(PATIENCE_S)
    etcd_scene.node()
    assert standing.result(PATIENCE_S) is None, "it takes part again, in this life of the run"
    leadership = etcd_scene.leadership()
    assert leadership.read_plan() is None
    assert leadership.read_ended() == ENDED


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff"])
def test_an_invalid_ended_record_counts_as_none(etcd_scene: EtcdScene, data: bytes) -> None:
    leadership = etcd_scene.leadership()
    assert leadership.read_ended() is None
    etcd_scene.stranger().set(f"{etcd_scene.prefix}r/run/ended", data)
    assert leadership.read_ended() is None


def test_a_late_write_of_an_abandoned_connection_has_no_effect(etcd_scene: EtcdScene) -> None:
    with Relay(etcd_scene.cluster.members[0].client_port) as relay:
        client = in_loop(EtcdClient.dial(relay.endpoint, etcd_scene.access, PATIENCE_S))
        table = EtcdTable(client, etcd_scene.prefix, lease=etcd_scene.kept)
        abandoned = Blocking(in_loop(NodeRecords.open(table, "run")))
        assert abandoned.register(member("a"), lease("a")) is not None
        relay.hold()
        late = begin(abandoned.records.write(member("a", state=State.RUNNING)))
        assert relay.held.wait(PATIENCE_S)
        abandoned.close()
        with pytest.raises(StoreLostError):
            late.result(PATIENCE_S)
        del late  # the call is in the traceback of its error, and holds the connection
        current = etcd_scene.node()
        assert current.register(member("a", state=State.FAILED), lease("a")) is not None
        relay.release()
        current.write(member("a", state=State.FAILED, slots=5))
        connections: Any = relay
        wait_for("the end of all that was held back", lambda: len(connections._sockets) == 1)
    assert etcd_scene.coordinator().read(["a"]).members["a"] == member("a", state=State.FAILED, slots=5)


class LeaseThatEndsAtOnce(KeptLease):
    """A lease that another program revokes before anything is written."""

    async def id(self, client: EtcdClient) -> int:
        lease_id = await super().id(client)
        await client.revoke(lease_id)
        return lease_id


ON_A_LEASE: dict[str, Callable[[EtcdScene], object]] = {
    "record": lambda scene: scene.node().register(member("a"), lease("a")),
    "report": lambda scene: scene.reports().write_report("a", b"failed"),
}


@pytest.mark.parametrize("write", ON_A_LEASE)
def test_what_cannot_be_written_is_not_taken_for_written(etcd_scene: EtcdScene, write: str) -> None:
    etcd_scene.joined("b")
    etcd_scene.kept = LeaseThatEndsAtOnce(LEASE_TTL_S)
    with pytest.raises(StoreLostError, match="expire as fast as they are granted"):
        ON_A_LEASE[write](etcd_scene)
