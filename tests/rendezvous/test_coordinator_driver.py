"""The driver of a run's coordinator: what it asks of the store and the disk, in which order, and when it waits."""

from __future__ import annotations

import math
import types
from collections.abc import Collection, Generator
from typing import Any, cast

import msgspec
import pytest
import structlog

from elastic_agent.protocol.records import Lease, Member, Phase, Plan, Policy, State
from elastic_agent.rendezvous.coordinator_driver import RunDriver
from elastic_agent.rendezvous.run_history import RunHistoryStore
from elastic_agent.transport.base import Snapshot
from elastic_agent.transport.coordinator_records import CoordinatorRecords
from tests.protocol.support import member, on_disk, world

LEASE_S = 10.0
RULES = Policy(min_nodes=1, max_nodes=2, lease_ttl_s=LEASE_S, settle_s=0.5, fence_margin_s=1.0)

MOST_WAITS = 1000
"""More often than any test lets time pass."""


class Store:
    """A store and a disk in memory that answer at once."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.leases: dict[str, Lease] = {}
        self.plan: Plan | None = None
        self.disk: Plan | None = None
        self.asked: list[tuple[Any, ...]] = []
        """All calls since the driver waited: the name, and the arguments."""

    async def read_plan(self) -> Plan | None:
        return self.plan

    async def read(self, names: Collection[str] | None) -> Snapshot:
        self.asked.append(("read", names))
        kept = [name for name in self.members if names is None or name in names]
        return Snapshot({name: self.members[name] for name in kept}, dict(self.leases))

    async def read_leases(self, names: Collection[str]) -> dict[str, Lease]:
        return dict(self.leases)

    async def publish(self, plan: Plan) -> None:
        self.asked.append(("publish", plan))
        self.plan = plan

    async def revoke(self, lease: Lease, reason: str) -> bool:
        self.asked.append(("revoke", lease))
        self.leases[lease.incarnation] = lease.revoke(reason)
        return True

    async def forget(self, incarnation: str) -> None:
        del self.members[incarnation], self.leases[incarnation]

    async def write_status(self, text: str) -> None: ...

    async def remove_run(self, ended: Plan | None) -> None:
        self.asked.append(("remove_run",))

    async def load(self, run_id: str) -> Plan | None:
        return self.disk

    async def save(self, run_id: str, history: Plan) -> None:
        self.asked.append(("save", history))
        self.disk = history


class Run(Store):
    """A driver, and the store and the disk that it uses."""

    def __init__(self, store_age_s: float = math.inf) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.waits_until_s: float | None = None
        self._waits = 0
        self.driver = RunDriver(
            "run",
            cast(CoordinatorRecords, self),
            cast(RunHistoryStore, self),
            _hints_from_the_test,
            lambda: self.now_s,
            structlog.get_logger(),
            keep_over_s=60.0,
            store_born_s=self.now_s - store_age_s,
        )
        self._life = self.driver.coordinate()
        self.resume(None)

    def resume(self, hints: Collection[str] | None) -> None:
        """Give the driver these hints, and run it until it waits again."""
        self.asked.clear()
        try:
            self.waits_until_s = self._life.send(hints)
        except StopIteration:
            self.waits_until_s = None

    def wait(self) -> None:
        """Let the time pass until which the driver waits."""
        assert self.waits_until_s is not None
        self._waits += 1
        assert self._waits < MOST_WAITS, "the driver does not do what is awaited"
        self.now_s = self.waits_until_s
        self.resume(())

    def wait_for(self, phase: Phase, *renewing: str) -> Plan:
        """Wait while these incarnations renew their leases, or all."""
        while self.plan is None or self.plan.phase is not phase:
            for name in renewing or self.leases:
                self.leases[name] = self.leases[name].renewed()
            self.wait()
        return self.plan

    def come(self, name: str, **fields: Any) -> str:
        """A node writes its record."""
        self.members[f"{name}-1"] = member(name, **{"generation": 0, "policy": RULES, **fields})
        self.leases.setdefault(f"{name}-1", Lease(f"{name}-1", LEASE_S))
        return f"{name}-1"

    def calls(self) -> list[str]:
        """Return what was asked for, in order."""
        return [name for name, *_ in self.asked]


@types.coroutine
def _hints_from_the_test(until_s: float) -> Generator[float, Collection[str], Collection[str]]:
    return (yield until_s)


@pytest.fixture
def run() -> Run:
    return Run()


def test_a_hint_causes_the_read_of_one_record_only(run: Run) -> None:
    run.resume([run.come("a")])
    run.come("b")
    run.resume(["b-1"])
    assert [args for name, *args in run.asked if name == "read"] == [[["b-1"]]]


def test_the_first_plan_includes_a_node_that_registered_at_the_last_moment() -> None:
    """The hint of that is still on its way, and it may run what no other node knows of."""
    run = Run(store_age_s=LEASE_S + RULES.fence_margin_s - 0.3)
    run.resume([run.come("c")])
    assert run.plan is None
    known = on_disk(3, world(3, "a-1"), order=("a",))
    run.come("a", state=State.RUNNING, generation=3, history=known)
    while run.plan is None:
        run.wait()
    assert (run.plan.phase, run.plan.generation) == (Phase.RUNNING, 3), run.plan.reason


def test_a_pause_of_the_coordinator_does_not_use_up_the_time_to_join(run: Run) -> None:
    rules = msgspec.structs.replace(RULES, min_nodes=2, join_timeout_s=2 * LEASE_S)
    run.resume([run.come("a", policy=rules)])
    begun_s = run.now_s
    assert run.waits_until_s is not None
    run.now_s = run.waits_until_s + 3 * LEASE_S
    run.resume(())
    assert run.plan is not None
    assert run.plan.phase is Phase.FORMING
    run.wait_for(Phase.FAILED)
    assert run.now_s == pytest.approx(begun_s + 3 * LEASE_S + 2 * LEASE_S)


def test_a_pause_of_the_coordinator_does_not_count_against_nodes(run: Run) -> None:
    run.resume([run.come("a")])
    run.now_s += 5 * LEASE_S  # the whole machine stood still, and no node could renew
    run.resume(())
    assert not run.leases["a-1"].revoked
    assert "revoke" not in run.calls()


def test_the_records_of_a_run_that_never_began_are_removed_after_a_while(run: Run) -> None:
    begun_s = run.now_s
    while run.waits_until_s is not None:
        run.wait()
    assert run.calls()[-1] == "remove_run"
    assert run.now_s == begun_s + 60.0
