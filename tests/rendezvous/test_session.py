"""A node's session over a real store: it registers, renews, hears, and survives what happens to the store."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.protocol.records import Address, FailureKind, Lease, Member, Plan
from elastic_agent.rendezvous import events
from elastic_agent.rendezvous.bootstrap_offers import StoreDialer
from elastic_agent.transport import NodeRecords
from elastic_agent.transport.base import StoreLostError
from elastic_agent.values import Endpoint
from tests.processes import no_descriptors_left
from tests.protocol.support import on_disk, world
from tests.relay import Relay

from .support import (
    LEASE_S,
    PATIENCE_S,
    Participant,
    hosted,
    participants,
    policy,
    run,
)


def test_an_error_while_handling_a_lost_lease_ends_the_session(endpoint: Endpoint, tmp_path: Path) -> None:
    """Otherwise the agent would hang without a lease, a timer or a message, until it is killed."""

    async def story() -> None:
        with hosted(endpoint, tmp_path / "host") as host:
            a = Participant("a", endpoint, policy(2, 2, lease_s=LEASE_S), tmp_path)

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

    async def dial_bootstrap(self, address: Address) -> None:
        with no_descriptors_left():
            await self._dialer.dial_bootstrap(address)

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


class LateRegistration:
    """A connector whose first registration is lost after the plan was read, as by an answer that comes too late."""

    def __init__(self, dialer: StoreDialer) -> None:
        self._dialer = dialer
        self._plan_read = asyncio.Event()
        self._lost = False

    async def connect(self) -> NodeRecords:
        records = await self._dialer.connect()
        register, next_plan = records.register, records.next_plan

        async def read(after: int, timeout_s: float) -> Plan | None:
            found = await next_plan(after, timeout_s)
            self._plan_read.set()
            return found

        async def lose_once(member: Member, lease: Lease) -> Lease | None:
            if self._lost:
                return await register(member, lease)
            await self._plan_read.wait()
            self._lost = True
            raise StoreLostError("no answer")

        records.register = lose_once  # type: ignore[method-assign]
        records.next_plan = read  # type: ignore[method-assign]
        return records

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dialer, name)


@pytest.mark.parametrize(("least", "generation"), [(1, 3), (2, 1)], ids=["runs", "forms"])
def test_a_store_with_less_history_gets_it_at_any_registration(
    endpoint: Endpoint, tmp_path: Path, least: int, generation: int
) -> None:
    """Also where it only forms the generation of which a node knows a world."""

    async def story() -> None:
        rules = policy(least, 2, lease_s=LEASE_S)  # which x may still have
        known = on_disk(generation, world(generation, "x-1"), order=("x",))
        async with Participant("c", endpoint, rules, tmp_path / "c") as c:
            if least == 1:
                assert (await c.running("c")).generation == 1
            late = Participant("a", endpoint, rules, tmp_path / "a", through=LateRegistration)
            late.session.history = known
            async with late as a:
                plan = await a.running(*(("c", "a") if least == 1 else ("a", "c")))
                assert plan.generation > known.generation

    run(story())


def test_the_newest_record_reaches_the_store_despite_broken_connections(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    async def story() -> None:
        rules = policy(1, 1)
        with hosted(endpoint, tmp_path / "host"), Relay(endpoint.port) as relay:
            async with participants("a", endpoint=relay.endpoint, rules=rules, folder=tmp_path) as (a,):
                generation = (await a.running("a")).generation
                for _ in range(3):
                    a.fail()
                    relay.cut()
                    generation = (await a.running("a", above=generation)).generation
                assert await a.session.flush(PATIENCE_S)
                assert a.node.plan is not None
                assert a.node.plan.charged == 3, "each failure is heard of once"

    run(story())
