"""A node's session: what it does when its store answers as a test wants it, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any, TypeVar, cast

import msgspec
import pytest

from elastic_agent.protocol.leases import RENEWALS_PER_LEASE
from elastic_agent.protocol.node import Announce
from elastic_agent.protocol.records import Address, Lease, Member, Phase, Plan, State
from elastic_agent.rendezvous import events
from elastic_agent.rendezvous.bootstrap_offers import StoreDialer
from elastic_agent.rendezvous.session import Session
from elastic_agent.transport.base import NotAStoreError, StoreLostError, TransportError, UnreachableError
from tests.protocol.support import member, plan, world
from tests.simulator.kernel import Inbox, Kernel
from tests.simulator.machine import Machine
from tests.simulator.waits import SimulatedWaits, take

from .support import policy

LEASE_S = 6.0
WORLD = world(1, "a-1")
JOIN_S = 30.0
LATE_S = 1e-6
MOST_EVENTS = 10_000
"""More than happen in a few leases."""
E = TypeVar("E", bound=events.SessionEvent)
T = TypeVar("T")


@dataclass(eq=False)
class Handle:
    """A bootstrap store that is offered."""

    address: Address = field(default_factory=lambda: Address("127.0.0.1", 29500))
    rests: bool = True
    closed: bool = False

    def close(self) -> None:
        self.closed = True


class Connection(Handle):
    """A connection to the store."""

    store_id = "store"
    local_address = "127.0.0.1"

    def __init__(self, node: Node) -> None:
        super().__init__()
        self._node = node

    async def next_plan(self, after: int, timeout_s: float) -> None:
        await take(Inbox(self._node.kernel), timeout_s)

    async def register(self, member: Member, lease: Lease) -> Lease:
        await self._ask("register")
        self._node.lease = lease
        return lease

    async def renew(self, expected: Lease, renewed: Lease) -> bool:
        await self._ask("renew", expected, renewed)
        return self._node.renew(expected, renewed)

    async def read_lease(self, incarnation: str) -> Lease | None:
        await self._ask("read_lease")
        return self._node.lease

    async def read_plan(self) -> Plan:
        await self._ask("read_plan")
        return self._node.stored

    async def write(self, member: Member) -> None:
        await self._ask("write", member)

    async def _ask(self, what: str, *args: Any) -> None:
        await self._node.asked_for(what, *args)
        if self._node.loses(self, what, args):
            await never(self._node.kernel)
        if self._node.answer_takes_s:
            await take(Inbox(self._node.kernel), self._node.answer_takes_s)


async def never(kernel: Kernel) -> None:
    """Give no answer."""
    while True:
        await take(Inbox(kernel), None)


class Node(SimulatedWaits):
    """A session whose requests are answered at once, or not at all."""

    def __init__(self, hangs: Callable[[str], bool] | None = None) -> None:
        """``hangs``: which requests are never answered, and then no request is answered by a time-out."""
        self.loses: Callable[[Connection, str, tuple[Any, ...]], bool] = lambda *request: False
        """Which requests are answered by their time-out."""
        self.answer_takes_s = 0.0
        self.obstacle: TransportError | None = None
        """The error with which dialling fails."""
        self.refusal = ""
        """The error with which the store refuses renewals; empty: it takes them."""
        self.lease: Lease | None = None
        """In the store."""
        self.stored = plan(Phase.RUNNING, WORLD.generation, 1, world=WORLD)
        """The plan there."""
        machine = Machine(Kernel(0), "m", 0.0)
        super().__init__(machine, machine.process("agent"))
        self.hangs = hangs
        self.told: list[tuple[float, events.SessionEvent]] = []
        self.handles: list[Handle] = []
        self.requests: list[tuple[Any, ...]] = []
        rules = policy(1, 1, lease_s=LEASE_S)
        self.session = Session(
            cast(StoreDialer, self),
            member("a", generation=0, policy=rules, bootstrap=None),
            LEASE_S,
            join_timeout_s=JOIN_S,
            clock=machine.clock,
            waits=self,
        )
        self.session.listen(lambda event: self.told.append((machine.clock(), event)))
        self.life = self.spawn(self.session.run)

    def go_on(self, seconds: float) -> None:
        """Let time pass. A session that does something again and again at one time fails."""
        until_s, most = self.kernel.now + seconds, self.kernel.events + MOST_EVENTS
        self.kernel.run(until_s, lambda: self.kernel.events > most)
        assert self.kernel.now == until_s, "no time passes"

    def of(self, kind: type[E]) -> list[E]:
        return [event for _, event in self.told if isinstance(event, kind)]

    def times_of(self, kind: type[events.SessionEvent]) -> list[float]:
        return [at_s for at_s, event in self.told if isinstance(event, kind)]

    # -- what the session reaches ---------------------------------------------------------------

    async def in_time(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        return await (work if self.hangs is not None else super().in_time(work, timeout_s))

    async def connect(self) -> Connection:
        await self.asked_for("connect")
        if self.obstacle is not None:
            raise self.obstacle
        connection = Connection(self)
        self.handles.append(connection)
        return connection

    async def offer_bootstrap(self, local_address: str) -> Handle:
        await self.asked_for("offer")
        self.handles.append(Handle())
        return self.handles[-1]

    async def dial_bootstrap(self, address: Address) -> None:
        await self.asked_for("dial", address)

    async def asked_for(self, what: str, *args: Any) -> None:
        self.requests.append((what, *args))
        if self.hangs is not None and self.hangs(what):
            await never(self.kernel)

    def renew(self, expected: Lease, renewed: Lease) -> bool:
        """Return what the store does with a renewal."""
        if self.refusal:
            raise StoreLostError(self.refusal)
        self.lease = renewed if self.lease == expected else self.lease
        return self.lease == renewed


def is_request(what: str) -> bool:
    """Return whether it is one to the store, over a connection."""
    return what not in ("connect", "offer", "dial")


def breaks(what: str) -> bool:
    if is_request(what):
        raise StoreLostError("the connection broke")
    return what == "connect"


@pytest.mark.parametrize("hangs", [is_request, breaks], ids=["every request", "dialling"])
def test_the_end_of_the_lease_is_detected_on_time_while_requests_or_dialling_hang(
    hangs: Callable[[str], bool],
) -> None:
    node = Node()
    node.go_on(0.1)
    deadline_s = node.session.deadline_s
    assert deadline_s is not None
    node.hangs = hangs
    node.go_on(3 * LEASE_S)
    (lost_s,) = node.times_of(events.LeaseLost)
    assert deadline_s <= lost_s < deadline_s + LATE_S
    if hangs is breaks:
        assert all(handle.closed for handle in node.handles), "both connections are given up when one breaks"


def test_an_agent_that_was_paused_says_so_also_if_its_guard_reports_before_its_timer_runs() -> None:
    node = Node()
    node.go_on(0.1)
    node.machine.pause()
    node.go_on(2 * LEASE_S)
    node.session.fenced("the guard killed the workers")
    node.machine.resume()
    node.go_on(LEASE_S)
    (lost,) = node.of(events.LeaseLost)
    assert "this agent was paused for" in lost.reason


def test_the_lease_is_renewed_while_the_bootstrap_store_of_the_next_world_does_not_answer() -> None:
    node = Node(lambda what: what == "dial")
    node.go_on(0.1)
    node.session.prepare(WORLD)
    node.go_on(3 * LEASE_S)
    assert ("dial", WORLD.bootstrap) in node.requests
    assert len(node.times_of(events.Renewed)) >= 3 * RENEWALS_PER_LEASE
    assert not node.times_of(events.LeaseLost)


@pytest.mark.parametrize("answer_takes_s", [0.0, 0.2 * LEASE_S])
def test_renewals_are_sent_in_even_steps_from_the_last_one_of_any_kind(answer_takes_s: float) -> None:
    """One that is out of step is noticed late; with slow answers, less would be left for the one after a lost one."""
    node = Node()
    node.answer_takes_s = answer_takes_s
    node.go_on(1.0)
    if not answer_takes_s:
        node.session.prepare(WORLD)
    node.go_on(3 * LEASE_S)
    renewed_s = node.times_of(events.Renewed)
    assert len(renewed_s) >= 2 * RENEWALS_PER_LEASE
    if not answer_takes_s:
        assert renewed_s[0] == pytest.approx(node.times_of(events.Prepared)[0], abs=LATE_S)
    steps_s = [later_s - earlier_s for earlier_s, later_s in pairwise(renewed_s)]
    assert steps_s == pytest.approx([LEASE_S / RENEWALS_PER_LEASE] * len(steps_s), abs=LATE_S)


def test_a_silently_dead_connection_does_not_cost_the_lease() -> None:
    node = Node()
    node.go_on(0.1)
    dead = node.handles[:]
    node.loses = lambda connection, what, args: connection in dead
    node.go_on(3 * LEASE_S)
    (disconnected,) = node.of(events.Disconnected)
    assert "no answer within" in disconnected.reason
    assert all(handle.closed for handle in dead)
    assert len(node.of(events.Renewed)) >= 2 * RENEWALS_PER_LEASE
    assert not node.of(events.LeaseLost)


NO_ROUTE, NOT_A_STORE = UnreachableError("no route to host"), NotAStoreError("used by another program")
DIALS = 2.0
"""More than the longest pause between two dials."""


def lose(node: Node, obstacle: TransportError) -> None:
    """Break the connections to the store, and have dialling fail from now on."""
    node.obstacle, dead = obstacle, node.handles[:]
    node.loses = lambda connection, what, args: connection in dead
    node.go_on(LEASE_S)


def reasons(node: Node) -> list[str]:
    """Return the reasons for giving the store up, each once."""
    return [*dict.fromkeys(event.reason for event in node.of(events.GivenUp))]


def test_a_store_is_given_up_after_the_join_timeout_with_the_newest_reason() -> None:
    node = Node()
    node.obstacle = UnreachableError("refused")
    node.go_on(JOIN_S - DIALS)
    node.obstacle = NO_ROUTE
    assert not reasons(node)
    node.go_on(2 * DIALS)
    assert reasons(node) == ["the store did not answer for 30 s: no route to host"]


@pytest.mark.parametrize("obstacle", [NO_ROUTE, NOT_A_STORE], ids=["no route", "another program"])
def test_the_join_timeout_begins_anew_with_each_loss_of_the_store(obstacle: TransportError) -> None:
    """The machine of a store that has answered may have been restarted, and listens with other programs first."""
    node = Node()
    node.go_on(0.1)
    for incarnation in ("a-2", "a-3"):
        lose(node, obstacle)
        node.go_on(JOIN_S - LEASE_S - DIALS)
        node.obstacle = None
        node.session.rejoin(incarnation)
        node.go_on(DIALS)
    assert len(node.of(events.Connected)) == 3
    assert not reasons(node)
    lose(node, obstacle)
    node.go_on(JOIN_S + DIALS)
    assert reasons(node) == [f"the store did not answer for 30 s: {obstacle}"]


def test_a_store_that_is_of_no_use_from_the_beginning_is_given_up_at_once() -> None:
    node = Node()
    node.obstacle = NOT_A_STORE
    node.go_on(0.0)
    assert reasons(node) == ["used by another program"]


def test_a_lease_survives_two_lost_renewals_in_a_row() -> None:
    node, renewals = Node(), count(1)
    node.loses = lambda _, what, args: what == "renew" and next(renewals) in (2, 3)
    node.go_on(3 * LEASE_S)
    assert len(node.of(events.Connected)) == 3
    assert next(renewals) > 4
    assert not node.of(events.LeaseLost)


def test_a_lease_that_cannot_be_renewed_says_what_the_store_answered() -> None:
    node = Node()
    node.go_on(0.1)
    node.refusal = "the store is full"
    node.go_on(2 * LEASE_S)
    assert [event.reason for event in node.of(events.LeaseLost)] == [
        "lost the lease of 6 s: it was not renewed in time: the store is full"
    ]
    fenced = Node()
    fenced.go_on(0.1)
    fenced.refusal = "the store is full"
    fenced.go_on(LEASE_S / 2)
    fenced.session.fenced("the guard killed the workers when the lease expired")
    assert fenced.of(events.LeaseLost)[0].reason.endswith("when the lease expired: the store is full")
    hanging = Node(hangs=lambda what: what == "renew")
    hanging.go_on(2 * LEASE_S)
    assert hanging.of(events.LeaseLost)[0].reason.endswith("not renewed in time: the store did not answer")


def test_a_node_reads_why_its_lease_was_revoked() -> None:
    node = Node()
    node.go_on(0.1)
    assert node.lease is not None
    node.lease = node.lease.revoke("did not start its workers within 30 s (--start-timeout)")
    node.go_on(LEASE_S / RENEWALS_PER_LEASE)
    (lost,) = node.of(events.LeaseLost)
    assert "did not start its workers within 30 s (--start-timeout)" in lost.reason


def test_an_outdated_world_is_not_started_although_its_bootstrap_store_answers() -> None:
    node = Node(lambda what: what == "dial")
    node.go_on(0.1)
    node.session.prepare(WORLD)
    node.go_on(0.1)
    node.hangs = None
    node.session.rejoin("a-2")
    node.go_on(LEASE_S)
    assert not node.times_of(events.Prepared)
    node.session.prepare(WORLD)
    node.go_on(0.1)
    assert len(node.times_of(events.Prepared)) == 1


@pytest.mark.parametrize("phase", [Phase.FORMING, Phase.RUNNING])
def test_no_worker_starts_if_the_plan_has_moved_on_since_the_world_was_to_be_prepared(phase: Phase) -> None:
    node = Node()
    node.go_on(0.1)
    generation = WORLD.generation + 1
    node.stored = plan(phase, generation, 2, world=world(generation, "a-1"))
    node.session.prepare(WORLD)
    node.go_on(LEASE_S)
    assert ("read_plan",) in node.requests
    assert ("dial", WORLD.bootstrap) not in node.requests
    assert not node.times_of(events.Prepared)


def test_a_closed_session_closes_its_connections_and_bootstrap_stores() -> None:
    node = Node()
    node.session.announce(Announce(State.READY, 1))
    node.go_on(0.1)
    assert not any(handle.closed for handle in node.handles)
    node.life.cancel()
    assert all(handle.closed for handle in node.handles)
    assert len(node.handles) == 3


def test_a_bootstrap_store_that_workers_use_is_not_closed_for_want_of_a_port() -> None:
    """A new store of the run asks for a fresh offer while they are starting."""
    ports_are_free = True

    def fails(what: str) -> bool:
        if what == "offer" and not ports_are_free:
            raise TransportError("no port is free")
        return False

    node = Node(fails)
    node.session.announce(Announce(State.READY, WORLD.generation))
    node.go_on(0.1)
    (offer,) = [handle for handle in node.handles if handle is node.session.offer]
    node.session.prepare(msgspec.structs.replace(WORLD, bootstrap=offer.address))
    node.go_on(0.1)
    ports_are_free = False
    node.session.announce(Announce(State.READY, WORLD.generation))
    node.go_on(LEASE_S)
    assert not offer.closed
    node.session.announce(Announce(State.READY, WORLD.generation + 1))
    node.go_on(LEASE_S)
    assert offer.closed
