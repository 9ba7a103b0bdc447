"""A coordinator: the shipped driver of a run, in a process of the simulated universe."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from elastic_agent.protocol.codec import decode, encode
from elastic_agent.protocol.records import Lease, Member, Plan
from elastic_agent.rendezvous.coordinator_driver import RunDriver
from elastic_agent.rendezvous.coordinator_effects import (
    LEAST_WAIT_S,
    DiskEffect,
    Forget,
    LoadHistory,
    Publish,
    ReadLeases,
    ReadPlan,
    ReadRecords,
    RemoveRun,
    Revoke,
    SaveHistory,
    WaitForHints,
    WriteStatus,
)
from elastic_agent.rendezvous.effects import Effect
from elastic_agent.transport.base import Snapshot
from elastic_agent.transport.record_reader import RecordReader

from .driving import drive
from .kernel import Inbox, Process, Routine
from .machine import Machine
from .network import Connection, StoreLostError
from .store import Store, Stored

if TYPE_CHECKING:
    from .cluster import Cluster

PATIENCE = 2000
"""How many effects a driver may yield before it must wait."""

RETRY_S = 0.05
KEEP_OVER_LEASES = 3.0
"""How long the records of a run that is over stay."""


class RetiredError(StoreLostError):
    """This coordinator does nothing any more."""


class Coordination:
    """What one coordinator's driver asks for, performed on the simulated store and disk."""

    def __init__(self, cluster: Cluster, machine: Machine, process: Process, store: Store) -> None:
        self.cluster = cluster
        self.machine = machine
        self.process = process
        self.store = store
        self.name = f"coordinator on {machine.name}"
        self.deposed = False
        self.seen: dict[str, tuple[Member, Lease]] = {}
        """What this coordinator was told, kept apart from its own memory for the checker."""
        self._met: set[str] = set()
        """All incarnations of which it has read."""
        self._hints = Inbox(cluster.kernel)
        self._connection: Connection | None = None
        self._records = RecordReader("run")
        self._effects = 0
        """How many the driver has yielded since it waited."""

    # -- performing what the driver asks for ----------------------------------------------------

    def perform(self, effect: Effect[Any]) -> Routine:
        """Perform one effect."""
        self._effects += 1
        self.cluster.at(type(effect).__name__, None)
        if self._effects > PATIENCE:
            self.cluster.checker.broken("liveness", f"the coordinator does not come to rest: {effect}")
        if isinstance(effect, WaitForHints):
            return (yield from self._wait(effect.until_s))
        if isinstance(effect, DiskEffect):
            return (yield from self._use_disk(effect))
        return (yield from self._use_store(effect))

    def _use_disk(self, effect: DiskEffect[Any]) -> Routine:
        if isinstance(effect, LoadHistory):
            return self.machine.disk
        assert isinstance(effect, SaveHistory)
        yield self.cluster.crash_point("before remembering", self.process)
        machine, history = self.machine, effect.history
        try:
            kept = yield from machine.history_store(self.process).save_within_time(history)
        except OSError:
            if machine.not_on_disk is None or machine.not_on_disk.rank < history.rank:
                machine.not_on_disk = history
            raise
        self.cluster.checker.saved(history, kept)

    def _use_store(self, effect: Effect[Any]) -> Routine:
        match effect:
            case ReadPlan():
                data = yield from self._ask("read_plan")
                return decode(Plan, data) if data is not None else None
            case ReadRecords(incarnations):
                return (yield from self._read(incarnations))
            case ReadLeases():
                return (yield from self._read_leases())
            case Publish(plan):
                return (yield from self._publish(plan))
            case Revoke(lease, reason):
                return (yield from self._revoke(lease, reason))
            case Forget(incarnation):
                yield from self._write("forget", incarnation)
            case WriteStatus(text):
                yield from self._write("write_status", text)
            case RemoveRun():
                if not self.cluster.endpoint.may_remove:
                    return False  # as if a node had registered meanwhile
                yield from self._ask("end_life")
                return (yield from self._ask("remove_run", frozenset(self._met)))
            case _:
                raise TypeError(effect)

    def _ask(self, method: str, *args: Any) -> Routine:
        if self._connection is None or self._connection.closed:
            self._connection = self.store.connect(self.machine)
        return (yield from self._connection.call(method, *args, timeout_s=self.cluster.call_s()))

    def _write(self, method: str, *args: Any) -> Routine:
        """As coordinator."""
        return (yield from self._ask(method, *args))

    def _wait(self, until_s: float) -> Routine:
        self._effects = 0
        if self.deposed:
            raise RetiredError
        wait_s = max(until_s - self.machine.clock(), LEAST_WAIT_S)
        hint = yield self._hints, self.machine.real_s(wait_s) + 1e-9
        hints = dict.fromkeys(one for one in (hint, *self._hints.items) if one is not None)
        self._hints.items.clear()
        return tuple(hints)

    def _read(self, incarnations: Collection[str] | None) -> Routine:
        yield self.cluster.stumble(self.process)
        found = yield from self._find(incarnations)
        self._met.update(found)
        rejected: list[str] = []
        members = {name: self._records.member(name, one.member, rejected) for name, one in found.items()}
        leases = self._records.leases({name: one.lease for name, one in found.items()}, rejected)
        for name, lease in leases.items():
            member = members[name]
            if member is not None:
                self.seen[name] = (member, lease)
        for name in {*(incarnations or ())} & self.seen.keys() - leases.keys():
            self._seen_revoked(name)  # its lease was removed: nothing can renew it any more
        return Snapshot(
            {name: member for name, member in members.items() if member is not None},
            leases,
            tuple(rejected),
            self._written_by(found),
        )

    def _find(self, incarnations: Collection[str] | None) -> Routine:
        """The stored records by incarnation."""
        return (yield from self._ask("read_records", incarnations))

    def _written_by(self, found: dict[str, Stored]) -> dict[str, float]:
        """By when at the latest leases had been written, if that is known."""
        return {}

    def _read_leases(self) -> Routine:
        yield self.cluster.stumble(self.process)
        found = yield from self._ask("read_leases")
        leases = self._records.leases(found, None)
        for name in leases.keys() & self.seen.keys():
            self.seen[name] = (self.seen[name][0], leases[name])
        return leases

    def _publish(self, plan: Plan) -> Routine:
        data = encode(plan)
        self.cluster.checker.intends(data, plan, self.seen)
        yield self.cluster.crash_point("before publishing", self.process)
        done = yield from self._write("publish", plan.version - 1, data)
        yield self.cluster.crash_point("after publishing", self.process)
        if not done and self.cluster.scenario.hosting == "cluster":
            raise RetiredError("another coordinator has published; this one, if it goes on, reads that first")
        return done

    def _revoke(self, lease: Lease, reason: str) -> Routine:
        name = lease.incarnation
        self.cluster.checker.revokes(self.seen[name][0])
        done = yield from self._write("revoke", name, encode(lease), encode(lease.revoke(reason)))
        if done:
            self._seen_revoked(name)
        return done

    def _seen_revoked(self, name: str) -> None:
        member, lease = self.seen[name]
        self.seen[name] = (member, lease.revoke())


class HostedCoordinator(Coordination):
    """The coordinator beside a c10d store, in a thread of its process, until it is retired or the run is over."""

    def __init__(self, cluster: Cluster, machine: Machine, process: Process, store: Store) -> None:
        super().__init__(cluster, machine, process, store)
        self._driver = self._new_driver()
        store.listen(self._hints, machine)
        process.spawn(self._run())

    def _new_driver(self) -> RunDriver:
        return RunDriver(
            self.machine.clock,
            StoryLog(self.cluster, self.name),
            keep_over_s=KEEP_OVER_LEASES * self.cluster.policy.lease_ttl_s,
            idle_s=self.cluster.policy.lease_ttl_s,  # hints are lost here, which no store of ours does
        )

    def _run(self) -> Routine:
        """Begin with what the store says again whenever it was lost, as the shipped thread does."""
        while not self.deposed:
            try:
                yield from self._until_begun()
                self._driver = self._new_driver()
                yield from drive(self._driver.coordinate(), self.perform)
                self.seen.clear()  # the run is removed, and another one may begin
                self._met.clear()
            except StoreLostError:
                yield RETRY_S
        self.store.unlisten(self._hints)

    def _until_begun(self) -> Routine:
        """A run is taken up when there is more of it than its name."""
        while not self.store.roster and self.store.plan is None and not self.deposed:
            yield self._hints, 0.1 * self.cluster.policy.lease_ttl_s
        self._hints.items.clear()

    def _wait(self, until_s: float) -> Routine:
        plan = self._driver.plan
        if self._driver.over and plan is not None and not self.cluster.may_go_on(plan):
            self.cluster.run_over(self)
            self.deposed = not self.cluster.goes_on_here
        hints = yield from super()._wait(until_s)
        if (
            plan is not None and self.store.version > plan.version
        ):  # by hosting "cluster", for a moment, there are two
            raise RetiredError("another coordinator has published; this one, if it goes on, reads that first")
        return hints


class StoryLog:
    """Writes what a driver logs into the story of the seed."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster = cluster
        self._name = name

    def _tell(self, event: str, **fields: Any) -> None:
        if self._cluster.told is not None:
            shown = ", ".join(str(value) for value in fields.values())
            self._cluster.story(self._name, "{}: {}", event, shown)

    debug = info = warning = error = _tell

    def exception(self, event: str, **fields: Any) -> None:
        """A driver has met an error of its own: in the simulator that ends the seed."""
        raise AssertionError(event) from sys.exception()
