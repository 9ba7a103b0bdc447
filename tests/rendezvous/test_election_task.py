"""Who coordinates a run in etcd, and what it takes from its machine's memory."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastic_agent.protocol.records import Lease, Phase, Plan, Policy
from elastic_agent.rendezvous.backends.etcd.backend import Members
from elastic_agent.rendezvous.backends.etcd.election import Election
from elastic_agent.rendezvous.run_history import RunHistoryStore
from elastic_agent.transport import NodeRecords
from elastic_agent.transport.etcd import EtcdTable, KeptLease, Leadership, campaign_for
from elastic_agent.transport.etcd.api import delete
from elastic_agent.values import Endpoint, EtcdAccess
from tests.etcd import EtcdCluster, set_up_long_ago
from tests.loop_thread import Blocking, in_loop
from tests.protocol.support import member, on_disk
from tests.transport.support import life_keys
from tests.waiting import wait_for

from .support import MARGIN_S, PATIENCE_S

RUN = "run"
ACCESS = EtcdAccess()
LEASE_S = 3600.0
"""None runs out during a test."""


@pytest.fixture
def new_etcd(tmp_path: Path) -> Iterator[Members]:
    """One that was just set up, or has lost its data."""
    with EtcdCluster(tmp_path) as cluster:
        yield members_of(cluster)


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    """Of an etcd that has been in use for long."""
    with EtcdCluster(tmp_path) as cluster:
        set_up_long_ago(cluster.endpoints, ACCESS.prefix)
        yield members_of(cluster)


def members_of(cluster: EtcdCluster) -> Members:
    return Members(Endpoint("127.0.0.1", cluster.members[0].client_port), ACCESS, PATIENCE_S)


@contextmanager
def election(members: Members, history_store: RunHistoryStore) -> Iterator[Election]:
    async def begin() -> tuple[Election, asyncio.Task[None]]:
        candidate = Election(RUN, members.root, members.dial, history_store, LEASE_S)
        return candidate, asyncio.create_task(candidate.live())

    async def end() -> None:
        taking_part.cancel()
        await asyncio.wait([taking_part])

    candidate, taking_part = in_loop(begin())
    try:
        yield candidate
    finally:
        in_loop(end())


@contextmanager
def term_of_the_run(members: Members) -> Iterator[Leadership]:
    """The coordinator of an earlier run."""
    table = table_of(members)
    keys = life_keys(table, RUN)
    Blocking(table).close()
    client = in_loop(members.dial())
    leadership = in_loop(campaign_for(client, members.root, keys, "a test", LEASE_S))
    assert leadership is not None
    try:
        yield leadership
    finally:
        in_loop(leadership.resign())


def table_of(members: Members) -> EtcdTable:
    client = in_loop(members.dial())
    return EtcdTable(client, members.root, lease=KeptLease.of_node(LEASE_S))


def node(members: Members, name: str) -> Any:
    """A node that came to the run."""
    link = Blocking(in_loop(NodeRecords.open(table_of(members), RUN)))
    rules = Policy(lease_ttl_s=LEASE_S, fence_margin_s=MARGIN_S)
    assert link.register(member(name, generation=0, policy=rules), Lease(f"{name}-1", LEASE_S)) is not None
    return link


def test_an_agent_that_ends_resigns(members: Members, tmp_path: Path) -> None:
    """Its leader key would last for longer than a test, as its lease does."""
    client = Blocking(in_loop(members.dial()))
    leader = f"{members.root}r/{RUN}/leader".encode()
    with election(members, RunHistoryStore(tmp_path / "state")):
        assert node(members, "a").next_plan(0, PATIENCE_S) is not None
        assert client.get(leader) is not None
    assert client.get(leader) is None


def test_a_coordinator_that_waits_in_etcd_ends_when_its_leader_key_is_gone(
    members: Members, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what keeps the key alive detects that, when this node's lease is renewed."""
    wait, is_waiting, was_ended = Leadership.wait, threading.Event(), threading.Event()

    async def recorded(leadership: Leadership, timeout_s: float) -> Sequence[str]:
        is_waiting.set()
        try:
            return await wait(leadership, timeout_s)
        except asyncio.CancelledError:
            was_ended.set()
            raise

    monkeypatch.setattr(Leadership, "wait", recorded)
    leader = f"{members.root}r/{RUN}/leader".encode()
    client = Blocking(in_loop(members.dial()))
    node(members, "a")
    with election(members, RunHistoryStore(tmp_path / "state")) as candidate:
        assert is_waiting.wait(PATIENCE_S)
        first = client.get(leader)
        client.transact([], [delete(leader)])
        in_loop(mark(candidate))
        assert was_ended.wait(PATIENCE_S)
        second = wait_for("the next leader", lambda: client.get(leader))
    assert second.create_revision > first.create_revision


async def mark(candidate: Election) -> None:
    candidate.mark()


class UnreadableHistory(RunHistoryStore):
    async def load(self, run_id: str) -> Plan | None:
        raise OSError("input/output error")


def test_an_agent_that_ends_while_it_resigns_still_gives_the_leader_key_back(
    members: Members, tmp_path: Path
) -> None:
    async def story() -> None:
        history_store = UnreadableHistory(tmp_path / "state")
        candidate = Election(
            RUN,
            members.root,
            members.dial,
            history_store,
            LEASE_S,
            on_resigned=lambda: taking_part.cancelling() or taking_part.cancel(),
        )
        taking_part = asyncio.create_task(candidate.live())
        await asyncio.wait([taking_part])

    node(members, "a")
    in_loop(story())
    client = Blocking(in_loop(members.dial()))
    assert client.get(f"{members.root}r/{RUN}/leader".encode()) is None


FINISHED = on_disk(generation=3, outcome=Phase.FINISHED)
STOPPED = on_disk(generation=4, charged=1, order=("b", "a"), outcome=Phase.STOPPED, settled=True)
FIRST_PLANS: dict[str, tuple[Plan | None, Plan | None, tuple[Phase, int, int]]] = {
    # what the machine remembers, how the run ended by what is in etcd, and the phase, generation and restarts used
    "a new run in an old etcd does not wait": (None, None, (Phase.FORMING, 1, 0)),
    "a run that etcd lost goes on above the disk": (on_disk(7, charged=2), None, (Phase.FORMING, 8, 2)),
    "an outcome that etcd lost stands until every node has read it": (FINISHED, None, (Phase.FINISHED, 3, 0)),
    # an agent of the old run that is about to end may be elected once more, when the next run has begun
    "the history of a finished run does not end a new one": (
        FINISHED,
        msgspec.structs.replace(FINISHED, settled=True),
        (Phase.FORMING, 4, 0),
    ),
    # the machine remembers an earlier generation of a run that still went on
    "a machine that missed the end starts above it": (
        on_disk(3, charged=1),
        on_disk(4, charged=1, outcome=Phase.FINISHED, settled=True),
        (Phase.FORMING, 5, 0),
    ),
    "a stopped run is resumed by a machine without its history": (None, STOPPED, (Phase.FORMING, 5, 1)),
}


@pytest.mark.parametrize("name", FIRST_PLANS)
def test_what_a_machine_and_etcd_remember_decides_the_first_plan(
    members: Members, tmp_path: Path, name: str
) -> None:
    remembered, ended, expected = FIRST_PLANS[name]
    history_store = RunHistoryStore(tmp_path / "state")
    if remembered is not None:
        Blocking(history_store).save(RUN, remembered)
    if ended is not None:
        with term_of_the_run(members) as leadership:
            Blocking(leadership.records).remove_run(ended)
    with election(members, history_store):
        plan = node(members, "a").next_plan(0, PATIENCE_S)
    assert plan is not None
    assert (plan.phase, plan.generation, plan.charged) == expected, plan.reason
    assert plan.world is None
    if ended is STOPPED:
        assert plan.order == STOPPED.order


def test_the_age_of_an_etcd_is_known(new_etcd: Members) -> None:
    """It is never stated too high: nodes of an earlier life may still run."""
    begun_s = time.monotonic()
    with term_of_the_run(new_etcd) as leadership:
        age_s = wait_for("a second to have passed", Blocking(leadership).store_age_s)
    assert begun_s + age_s <= time.monotonic()
