"""A node's session over a real store: it registers, renews, hears, and survives what happens to the store."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.linux import boottime_s
from elastic_agent.protocol.leases import RENEWALS_PER_LEASE
from elastic_agent.protocol.records import Address, FailureKind, History, Lease, Member, Phase, Plan
from elastic_agent.rendezvous import events
from elastic_agent.rendezvous.store_requests import BootstrapOffer, StoreDialer
from elastic_agent.transport import c10d
from elastic_agent.transport.base import NodeLink, StoreLostError, TransportError
from elastic_agent.values import Endpoint
from tests.ports import free_port
from tests.processes import no_descriptors_left
from tests.protocol.support import world

from .support import (
    LEASE_S,
    MARGIN_S,
    PATIENCE_S,
    Hindered,
    Participant,
    Relay,
    hosted,
    participants,
    policy,
    run,
)

LATE_S = 1.0
"""How late a timer may come on a busy machine."""


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint("127.0.0.1", free_port())


def test_a_node_registers_reads_its_world_and_renews(endpoint: Endpoint, tmp_path: Path) -> None:
    async def story() -> None:
        async with Participant("a", endpoint, policy(1, 1), tmp_path) as a:
            plan = await a.running("a")
            assert plan.generation == 1
            renewed = await a.hear(events.Renewed)
            later = await a.hear(events.Renewed, lambda event: event.deadline_s > renewed.deadline_s)
            assert later.deadline_s <= boottime_s() + LEASE_S
            assert [type(one) for one in a.told[:3]] == [events.Connected, events.Registered, events.PlanSeen]
            connected = a.of(events.Connected)
            assert [one.replaced for one in connected] == [False]

    run(story())


def test_renewals_are_sent_in_even_steps_from_the_last_one_of_any_kind(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    """One that is out of step is noticed late, and with it the loss of the node."""

    async def story() -> None:
        rules = policy(2, 2)
        async with Participant("a", endpoint, rules, tmp_path) as a:
            await a.hear(events.Registered)
            async with Participant("b", endpoint, rules, tmp_path):
                await a.hear(events.Prepared)
                prepared = a.of(events.Renewed)[-1]
                following = await a.hear(events.Renewed, lambda event: event.deadline_s > prepared.deadline_s)
                assert following.deadline_s - prepared.deadline_s >= LEASE_S / RENEWALS_PER_LEASE

    run(story())


def test_slow_answers_do_not_delay_renewals(endpoint: Endpoint, tmp_path: Path) -> None:
    """Or a slow store would leave less of the lease for the renewal after a lost one."""
    answer_takes_s, lease_s = 0.4, 3.0

    def renew(really: Callable[[], bool]) -> bool:
        done = really()
        time.sleep(answer_takes_s)  # what a slow store does
        return done

    async def story() -> None:
        rules = policy(1, 1, lease_s=lease_s)
        slow = Participant("a", endpoint, rules, tmp_path, through=lambda store: Hindered(store, renew))
        async with slow as a:
            await a.hear(events.Prepared)
            first = a.of(events.Renewed)[-1].deadline_s
            while len(a.of(events.Renewed)) < 3:
                await a.hear(events.Renewed, after=len(a.told))
            last = a.of(events.Renewed)[2].deadline_s
            assert last - first < 2 * (lease_s / RENEWALS_PER_LEASE) + answer_takes_s

    run(story())


def test_a_lease_survives_two_lost_renewals_in_a_row(endpoint: Endpoint, tmp_path: Path) -> None:
    lost = threading.Event()
    renewals = itertools.count(1)

    def renew(really: Callable[[], bool]) -> bool:
        if next(renewals) in (2, 3):
            lost.wait()  # it never gets to the store
        return really()

    async def story() -> None:
        rules = policy(1, 1, lease_s=5.0)
        unlucky = Participant("a", endpoint, rules, tmp_path, through=lambda store: Hindered(store, renew))
        async with unlucky as a:
            await a.hear(events.Prepared)
            await a.hear(events.Renewed, after=len(a.told))
            assert len(a.of(events.Connected)) == 3
            assert not a.of(events.LeaseLost)

    try:
        run(story())
    finally:
        lost.set()


def test_a_node_that_stops_renewing_is_revoked_and_named(endpoint: Endpoint, tmp_path: Path) -> None:
    async def story() -> None:
        with hosted(endpoint, tmp_path / "host"):
            async with participants("a", "b", endpoint=endpoint, rules=policy(1, 2), folder=tmp_path) as (
                a,
                b,
            ):
                first = await a.running("a", "b")
                await b.vanish()
                silent_s = boottime_s()
                forming = await a.plan(Phase.FORMING, lambda plan: plan.generation > first.generation)
                noticed_s = boottime_s() - silent_s
                assert forming.reason == "b lost"
                again = await a.running("a", above=first.generation)
                assert again.charged == 0
                assert noticed_s > LEASE_S * 0.5
                assert boottime_s() - silent_s > LEASE_S * 0.6 + MARGIN_S, (
                    "b's workers were not certainly dead before"
                )

    run(story())


def test_a_new_store_gets_the_history_and_keeps_a_running_world(endpoint: Endpoint, tmp_path: Path) -> None:
    async def story() -> None:
        rules = policy(2, 2, lease_s=8.0)
        with hosted(endpoint, tmp_path / "host"):
            nodes = participants("a", "b", endpoint=endpoint, rules=rules, folder=tmp_path)
            a, b = await nodes.__aenter__()
            first = await a.running("a", "b")
            a.fail()
            second = await b.running("a", "b", above=first.generation)
            await a.running("a", "b", above=first.generation)
        try:  # that store is gone
            heard = len(a.told)
            with hosted(endpoint, tmp_path / "another"):  # a state directory that knows nothing
                connected = await a.hear(events.Connected, after=heard)
                assert connected.replaced
                await a.hear(events.Registered, after=heard)
                adopted = await a.plan(Phase.RUNNING, after=heard)
                assert (adopted.generation, adopted.world) == (second.generation, second.world)
                assert adopted.charged == 1
                assert "continues without a restart" in adopted.reason
                await b.hear(events.Renewed, after=len(b.told))
            assert not a.of(events.LeaseLost)
            assert not b.of(events.LeaseLost)
        finally:
            await nodes.__aexit__(None, None, None)

    run(story())


def test_a_frozen_store_costs_the_lease_at_its_deadline_and_a_new_incarnation_joins(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    async def story() -> None:
        with hosted(endpoint, tmp_path / "host") as host:
            async with participants("a", endpoint=endpoint, rules=policy(1, 1), folder=tmp_path) as (a,):
                first = await a.running("a")
                await a.hear(events.Renewed)
                host.freeze()
                await a.hear(events.LeaseLost)
                lost_s = boottime_s()
                deadline_s = max(one.deadline_s for one in [*a.of(events.Registered), *a.of(events.Renewed)])
                assert deadline_s <= lost_s < deadline_s + LATE_S
                host.thaw()
                await a.hear(events.Registered, lambda event: event.incarnation == "a-2")
                again = await a.running("a", above=first.generation)
                assert again.world is not None
                assert again.world.seats[0].incarnation == "a-2"
                assert again.charged == 0

    run(story())


def test_an_error_while_handling_a_lost_lease_ends_the_session(endpoint: Endpoint, tmp_path: Path) -> None:
    """Otherwise the agent would hang without a lease, a timer or a message, until it is killed."""

    async def story() -> None:
        with hosted(endpoint, tmp_path / "host") as host:
            a = Participant("a", endpoint, policy(2, 2), tmp_path)

            def hear(event: events.SessionEvent) -> None:
                if isinstance(event, events.PlanSeen):  # both connections are there
                    host.freeze()
                if isinstance(event, events.LeaseLost):
                    raise OSError("no space left on device")

            a.session.listen(hear)
            with pytest.raises(OSError, match="no space left"):
                await asyncio.wait_for(a.session.run(), PATIENCE_S)

    run(story())


class WithoutDescriptors:
    """A connector of a process that has no file descriptor left when it is to dial a bootstrap store."""

    def __init__(self, dialer: StoreDialer) -> None:
        self._dialer = dialer

    def dial_bootstrap(self, address: Address, timeout_s: float) -> None:
        with no_descriptors_left():
            self._dialer.dial_bootstrap(address, timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dialer, name)


def test_a_node_that_cannot_open_a_socket_to_the_bootstrap_store_reports_it(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    """Otherwise the others would wait for it until the start time-out, without a reason in the log."""

    async def story() -> None:
        with hosted(endpoint, tmp_path / "host"):
            async with Participant("a", endpoint, policy(1, 1), tmp_path, through=WithoutDescriptors) as a:
                failed = await a.hear(events.PrepareFailed)
                assert failed.failure.kind is FailureKind.BOOTSTRAP
                assert "too many open files" in failed.failure.summary

    run(story())


class ShortOfPorts:
    """A connector that finds no port for the first bootstrap stores that it is to offer."""

    def __init__(self, dialer: StoreDialer, failures: int) -> None:
        self._dialer = dialer
        self._failures = failures

    def offer_bootstrap(self, local_address: str) -> BootstrapOffer:
        self._failures -= 1
        if self._failures >= 0:
            raise TransportError("no port of 29500:29500 is free for a bootstrap store")
        return self._dialer.offer_bootstrap(local_address)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dialer, name)


def test_a_failed_offer_of_a_bootstrap_store_is_retried_with_a_later_renewal(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    async def story() -> None:
        rules = policy(1, 1)
        short = Participant("a", endpoint, rules, tmp_path, through=lambda store: ShortOfPorts(store, 2))
        async with short as a:
            await a.hear(events.Renewed)
            assert await a.session.status() == (
                "waiting for a node that can offer a bootstrap store: a cannot offer a bootstrap store: "
                "no port of 29500:29500 is free for a bootstrap store"
            )
            plan = await a.running("a")
            assert plan.generation == 1

    run(story())


def test_a_run_without_any_bootstrap_store_fails_with_the_reason(endpoint: Endpoint, tmp_path: Path) -> None:
    async def story() -> None:
        rules = policy(1, 1, join_s=1.0)
        short = Participant("a", endpoint, rules, tmp_path, through=lambda store: ShortOfPorts(store, 999))
        async with short as a:
            failed = await a.plan(Phase.FAILED)
            assert failed.reason == (
                "no node could offer a bootstrap store within 1 s: a cannot offer a bootstrap store: "
                "no port of 29500:29500 is free for a bootstrap store"
            )

    run(story())


def test_a_node_reads_why_its_lease_was_revoked(endpoint: Endpoint, tmp_path: Path) -> None:
    async def story() -> None:
        with hosted(endpoint, tmp_path / "host"):
            rules = policy(1, 1, start_s=0.5)
            a = Participant("a", endpoint, rules, tmp_path)
            a.session.prepare = lambda world: None  # type: ignore[method-assign]  # its start hangs
            async with a:
                lost = await a.hear(events.LeaseLost)
                assert "did not start its workers within 0.5 s (--start-timeout)" in lost.reason

    run(story())


def test_a_renewal_with_a_lost_answer_is_detected_as_written(endpoint: Endpoint, tmp_path: Path) -> None:
    async def story() -> None:
        rules = policy(1, 1, lease_s=9.0)
        with hosted(endpoint, tmp_path / "host"), Relay(endpoint) as relay:
            async with participants("a", endpoint=relay.endpoint, rules=rules, folder=tmp_path) as (a,):
                await a.running("a")
                assert await a.session.flush(5.0)
                observer = c10d.dial(endpoint, "run", 5.0)
                before = observer.read_lease("a-1")
                assert before is not None
                relay.lose_answers()
                sent_s = boottime_s()
                while (stored := await asyncio.to_thread(observer.read_lease, "a-1")) == before:
                    await asyncio.sleep(0.05)  # there is no event for its arrival
                assert stored == before.renewed()
                relay.cut()
                heard = len(a.told)
                renewed = await a.hear(events.Renewed, after=heard)
                assert renewed.deadline_s < boottime_s() + 9.0, "it counts from when it was sent first"
                assert renewed.deadline_s > sent_s + 9.0
                assert not a.of(events.LeaseLost)
                observer.close()

    run(story())


def test_a_silently_dead_connection_does_not_cost_the_lease(endpoint: Endpoint, tmp_path: Path) -> None:
    async def story() -> None:
        rules = policy(1, 1, lease_s=6.0)
        with hosted(endpoint, tmp_path / "host"), Relay(endpoint) as relay:
            async with participants("a", endpoint=relay.endpoint, rules=rules, folder=tmp_path) as (a,):
                plan = await a.running("a")
                heard = len(a.told)
                relay.lose_answers()
                await a.hear(events.Connected, after=heard)
                await a.hear(events.Renewed, lambda event: event.deadline_s > boottime_s() + 5.0, after=heard)
                assert "no answer within" in a.of(events.Disconnected)[0].reason
                assert not a.of(events.LeaseLost)
                assert a.node.plan == plan

    run(story())


class LateRegistration:
    """A connector whose first registration is lost after the plan was read, as by an answer that comes too late."""

    def __init__(self, dialer: StoreDialer) -> None:
        self._dialer = dialer
        self._plan_read = threading.Event()
        self._lost = False

    def connect(self) -> NodeLink:
        link = self._dialer.connect()
        register, next_plan = link.register, link.next_plan

        def read(after: int, timeout_s: float) -> Plan | None:
            found = next_plan(after, timeout_s)
            self._plan_read.set()
            return found

        def lose_once(member: Member, lease: Lease) -> Lease | None:
            if self._lost:
                return register(member, lease)
            assert self._plan_read.wait(PATIENCE_S)
            self._lost = True
            raise StoreLostError("no answer")

        link.register = lose_once
        link.next_plan = read
        return link

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dialer, name)


def test_a_store_with_less_history_gets_it_at_any_registration(endpoint: Endpoint, tmp_path: Path) -> None:
    async def story() -> None:
        rules = policy(1, 2)
        known = History(3, world(3, "x-1"), order=("x",))
        async with Participant("c", endpoint, rules, tmp_path / "c") as c:
            assert (await c.running("c")).generation == 1
            late = Participant("a", endpoint, rules, tmp_path / "a", through=LateRegistration)
            late.session.history = known
            async with late as a:
                plan = await a.running("c", "a")
                assert plan.generation > known.generation

    run(story())


def test_the_newest_record_reaches_the_store_despite_broken_connections(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    async def story() -> None:
        rules = policy(1, 1, lease_s=30.0)
        with hosted(endpoint, tmp_path / "host"), Relay(endpoint) as relay:
            async with participants("a", endpoint=relay.endpoint, rules=rules, folder=tmp_path) as (a,):
                generation = (await a.running("a")).generation
                for _ in range(3):
                    a.fail()
                    relay.cut()
                    generation = (await a.running("a", above=generation)).generation
                assert await a.session.flush(5.0)
                assert a.node.plan is not None
                assert a.node.plan.charged == 3, "each failure is heard of once"
                assert len(a.of(events.Connected)) == 4

    run(story())


class SlowDialer:
    """A dialer whose connections arrive when a test wants it."""

    def __init__(self, dialer: StoreDialer) -> None:
        self._dialer = dialer
        self.asked, self.arrives, self.closed = threading.Event(), threading.Event(), threading.Event()

    def connect(self) -> NodeLink:
        link = self._dialer.connect()
        close = link.close

        def closed() -> None:
            close()
            self.closed.set()

        link.close = closed  # type: ignore[method-assign]
        self.asked.set()
        assert self.arrives.wait(PATIENCE_S)
        return link


def test_a_connection_that_arrives_when_nothing_waits_for_it_is_closed(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    dialers: list[SlowDialer] = []

    def slow(backend: StoreDialer) -> Any:
        dialers.append(SlowDialer(backend))
        return dialers[-1]

    async def story() -> None:
        with hosted(endpoint, tmp_path / "host"):
            async with Participant("a", endpoint, policy(1, 1), tmp_path, through=slow):
                (dialer,) = dialers
                assert await asyncio.to_thread(dialer.asked.wait, PATIENCE_S)
            dialer.arrives.set()
            assert await asyncio.to_thread(dialer.closed.wait, PATIENCE_S)

    run(story())
