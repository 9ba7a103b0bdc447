"""Who coordinates a run in etcd, and what it takes from its machine's memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from elastic_agent.protocol.records import RECORD_VERSION, History, Lease, Member, Phase, Policy, State
from elastic_agent.rendezvous.backends.etcd.backend import Members
from elastic_agent.rendezvous.backends.etcd.election_thread import ElectionThread
from elastic_agent.rendezvous.run_history import RunHistoryStore
from elastic_agent.transport.etcd import EtcdLink, KeptLeases, Leadership, RunKeys, run_life
from elastic_agent.values import Endpoint, EtcdAccess
from tests.etcd import EtcdCluster, set_up_long_ago
from tests.protocol.support import world
from tests.transport.etcd_scene import campaign

from .support import LEASE_S, MARGIN_S, PATIENCE_S

RUN = "run"
ACCESS = EtcdAccess()


@pytest.fixture
def new_etcd(tmp_path: Path) -> Iterator[Members]:
    """One that was just set up, or has lost its data."""
    with EtcdCluster(tmp_path) as cluster:
        yield Members(Endpoint("127.0.0.1", cluster.members[0].client_port), ACCESS)


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    """Of an etcd that has been in use for long."""
    with EtcdCluster(tmp_path) as cluster:
        set_up_long_ago(cluster.endpoints, ACCESS.prefix)
        yield Members(Endpoint("127.0.0.1", cluster.members[0].client_port), ACCESS)


@contextmanager
def election(members: Members, history_store: RunHistoryStore) -> Iterator[ElectionThread]:
    keys = RunKeys(ACCESS.prefix, RUN)
    one = ElectionThread(RUN, keys, lambda: members.dial()[0], history_store, LEASE_S, lambda: None)
    one.start()
    try:
        yield one
    finally:
        one.stop()
        one.join(PATIENCE_S)


def node(members: Members, name: str, **fields: object) -> EtcdLink:
    """A node that came to the run."""
    client, store = members.dial()
    link = EtcdLink(client, RunKeys(ACCESS.prefix, RUN), store, KeptLeases(LEASE_S))
    rules = Policy(lease_ttl_s=LEASE_S, fence_margin_s=MARGIN_S)
    member = Member(RECORD_VERSION, name, f"{name}-1", "127.0.0.1", 1, State.READY, 0, rules)
    member = msgspec.structs.replace(member, **fields)
    assert link.register(member, Lease(f"{name}-1", LEASE_S)) is not None
    return link


def test_the_history_of_a_finished_run_does_not_end_a_new_run(members: Members, tmp_path: Path) -> None:
    """An agent of the old run that is about to end may be elected once more, when the next run has begun."""
    history_store = RunHistoryStore(tmp_path / "state")
    history_store.save(RUN, History(generation=3, outcome=Phase.FINISHED))
    term_of_the_run(members).remove_run(History(generation=3, outcome=Phase.FINISHED, settled=True))
    with election(members, history_store):
        plan = node(members, "a").next_plan(0, PATIENCE_S)
    assert plan is not None
    assert (plan.phase, plan.generation) == (Phase.FORMING, 4), plan.reason


def test_a_finished_run_is_not_restarted_when_etcd_loses_its_outcome(
    members: Members, tmp_path: Path
) -> None:
    """Not every node has acknowledged it yet."""
    history_store = RunHistoryStore(tmp_path / "state")
    history_store.save(RUN, History(generation=3, outcome=Phase.FINISHED))
    with election(members, history_store):
        plan = node(members, "a").next_plan(0, PATIENCE_S)
    assert plan is not None
    assert (plan.phase, plan.generation) == (Phase.FINISHED, 3), plan.reason


def test_a_new_etcd_forms_no_world_until_earlier_nodes_registered_or_are_fenced(
    new_etcd: Members, tmp_path: Path
) -> None:
    """A node that knows nothing of them is elected first; they are slow to dial again."""
    registered_s = time.monotonic()
    c = node(new_etcd, "c")
    with election(new_etcd, RunHistoryStore(tmp_path / "state")):
        assert c.next_plan(0, 0.5 * LEASE_S) is None
        assert "the store is empty" in c.read_status()
        plan = c.next_plan(0, PATIENCE_S)
    assert plan is not None
    assert (plan.phase, plan.generation) == (Phase.FORMING, 1), plan.reason
    assert time.monotonic() - registered_s > LEASE_S + MARGIN_S


def test_a_world_lost_by_etcd_continues_although_another_node_registered_first(
    new_etcd: Members, tmp_path: Path
) -> None:
    node(new_etcd, "c")
    with election(new_etcd, RunHistoryStore(tmp_path / "state")):
        known = History(3, world(3, "a-1"), order=("a",))
        a = node(new_etcd, "a", state=State.RUNNING, generation=3, history=known)
        plan = a.next_plan(0, 0.5 * LEASE_S)
    assert plan is not None
    assert (plan.phase, plan.generation) == (Phase.RUNNING, 3), plan.reason


def test_a_new_run_in_an_old_etcd_does_not_wait(members: Members, tmp_path: Path) -> None:
    with election(members, RunHistoryStore(tmp_path / "state")):
        plan = node(members, "a").next_plan(0, 0.5 * LEASE_S)
    assert plan is not None
    assert (plan.phase, plan.generation) == (Phase.FORMING, 1), plan.reason


def test_the_age_of_an_etcd_is_known(new_etcd: Members) -> None:
    leadership = term_of_the_run(new_etcd)
    first_s = time.monotonic()
    assert leadership.store_age_s() == 0.0
    while (age_s := leadership.store_age_s()) < 1.0:
        time.sleep(0.1)
    assert age_s <= time.monotonic() - first_s + 1.0


def test_an_unfinished_run_lost_by_etcd_continues_above_the_history_on_disk(
    members: Members, tmp_path: Path
) -> None:
    history_store = RunHistoryStore(tmp_path / "state")
    history_store.save(RUN, History(generation=7, charged=2))
    with election(members, history_store):
        plan = node(members, "a").next_plan(0, PATIENCE_S)
    assert plan is not None
    assert (plan.phase, plan.generation, plan.charged) == (Phase.FORMING, 8, 2), plan.reason


def test_a_machine_that_missed_the_end_of_its_run_starts_above_it(members: Members, tmp_path: Path) -> None:
    """It remembers an earlier generation of a run that still went on; etcd knows how that run ended."""
    history_store = RunHistoryStore(tmp_path / "state")
    history_store.save(RUN, History(generation=3, charged=1))
    ended = History(generation=4, charged=1, outcome=Phase.FINISHED, settled=True)
    term_of_the_run(members).remove_run(ended)
    with election(members, history_store):
        plan = node(members, "a").next_plan(0, PATIENCE_S)
    assert plan is not None
    assert (plan.phase, plan.generation, plan.charged) == (Phase.FORMING, 5, 0), plan.reason
    assert plan.world is None


def test_a_stopped_run_is_resumed_by_a_machine_without_its_history(members: Members, tmp_path: Path) -> None:
    ended = History(generation=4, charged=1, order=("b", "a"), outcome=Phase.STOPPED, settled=True)
    term_of_the_run(members).remove_run(ended)
    with election(members, RunHistoryStore(tmp_path / "state")):
        plan = node(members, "a").next_plan(0, PATIENCE_S)
    assert plan is not None
    assert (plan.phase, plan.generation, plan.charged) == (Phase.FORMING, 5, 1), plan.reason
    assert plan.order == ("b", "a")


def term_of_the_run(members: Members) -> Leadership:
    client, keys = members.dial()[0], RunKeys(ACCESS.prefix, RUN)
    run_life(client, keys)
    leadership = campaign(client, keys, "a test", LEASE_S, 0.1)
    assert leadership is not None
    return leadership
