"""A coordinator: the shipped driver of a run and the shipped records, in a process of the simulated universe."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from elastic_agent.protocol.records import Lease, Member
from elastic_agent.rendezvous.coordinator_driver import RunDriver
from elastic_agent.rendezvous.coordinator_effects import (
    LEAST_WAIT_S,
    DiskEffect,
    LoadHistory,
    SaveHistory,
    StoreCall,
    WaitForHints,
)
from elastic_agent.rendezvous.effects import Effect
from elastic_agent.transport import CoordinatorRecords, LifeKeys, StoreLostError, begun_runs, life_of

from .kernel import Inbox, Process, Routine
from .machine import RUN, Machine
from .performing import HAIR_S, Performer, awaited
from .store import KEYS, SimulatedTable, Store

if TYPE_CHECKING:
    from .cluster import Cluster

PATIENCE = 2000
"""How many effects a driver may yield before it must wait."""

RETRY_S = 0.05
KEEP_OVER_LEASES = 3.0
"""How long the records of a run that is over stay."""


class RetiredError(StoreLostError):
    """This coordinator does nothing any more."""


class Coordination(Performer):
    """What one coordinator's driver asks for, performed on the shipped records and the simulated disk."""

    records: CoordinatorRecords

    def __init__(self, cluster: Cluster, machine: Machine, process: Process, store: Store) -> None:
        super().__init__(machine, process)
        self.cluster = cluster
        self.store = store
        self.name = f"coordinator on {machine.name}"
        self.deposed = False
        self.seen: dict[str, tuple[Member, Lease]] = {}
        """What this coordinator was told, kept apart from its own memory for the checker."""
        self._hints = Inbox(cluster.kernel)
        self._effects = 0
        """How many the driver has yielded since it waited."""

    def perform(self, effect: Effect[Any]) -> Routine:
        """Perform one effect."""
        self._effects += 1
        call = effect.method.__name__ if isinstance(effect, StoreCall) else ""
        if isinstance(effect, StoreCall) and call == "publish":
            self.cluster.checker.intends(effect.args[0], self.seen)
        yield from self._reached(call or type(effect).__name__)
        if self._effects > PATIENCE:
            self.cluster.checker.broken("liveness", f"the coordinator does not come to rest: {effect}")
        match effect:
            case WaitForHints(until_s):
                return (yield from self._wait_for_hints(until_s))
            case DiskEffect():
                return (yield from self._use_disk(effect))
            case StoreCall(CoordinatorRecords.publish):
                yield from self._use_store(effect)
                return (yield from self._reached("published"))
            case StoreCall(CoordinatorRecords.revoke, (lease, _)):
                return (yield from self._revoke(effect, lease))
            case StoreCall(CoordinatorRecords.read, (incarnations,)):
                return (yield from self._read(effect, incarnations))
            case StoreCall(CoordinatorRecords.read_leases):
                return (yield from self._read_leases(effect))
            case StoreCall():
                return (yield from self._use_store(effect))
            case _:
                raise TypeError(effect)

    def _reached(self, point: str) -> Routine:
        self.cluster.at(point, None)
        if self.cluster.strikes_at(point, self.process):
            yield 0.0

    def _use_disk(self, effect: DiskEffect[Any]) -> Routine:
        if isinstance(effect, LoadHistory):
            return self.machine.disk
        assert isinstance(effect, SaveHistory)
        machine, history = self.machine, effect.history
        try:
            kept = yield from machine.history_store(self.process).save_within_time(history)
        except OSError:
            if machine.not_on_disk is None or machine.not_on_disk.rank < history.rank:
                machine.not_on_disk = history
            raise
        self.cluster.checker.saved(history, kept)

    def _use_store(self, effect: StoreCall[Any]) -> Routine:
        """Perform it; between any two of its requests the process may be frozen or killed."""
        requests = awaited(effect.perform(self.records))
        try:
            wanted = next(requests)
            while True:
                answer = yield wanted
                yield from self._reached("store request")
                wanted = requests.send(answer)
        except StopIteration as end:
            return end.value
        finally:
            requests.close()

    def _wait_for_hints(self, until_s: float) -> Routine:
        self._effects = 0
        if self.deposed:
            raise RetiredError
        wait_s = max(until_s - self.machine.clock(), LEAST_WAIT_S)
        hint = yield self._hints, self.machine.real_s(wait_s) + HAIR_S
        hints = dict.fromkeys(one for one in (hint, *self._hints.items) if one is not None)
        self._hints.items.clear()
        return tuple(hints)

    def _read_leases(self, effect: StoreCall[Any]) -> Routine:
        answer = yield from self._use_store(effect)
        for name in answer.keys() & self.seen.keys():
            self.seen[name] = (self.seen[name][0], answer[name])
        return answer

    def _read(self, effect: StoreCall[Any], incarnations: Collection[str] | None) -> Routine:
        answer = yield from self._use_store(effect)
        for name in answer.members.keys() & answer.leases.keys():
            self.seen[name] = (answer.members[name], answer.leases[name])
        for name in {*(incarnations or ())} & self.seen.keys() - answer.leases.keys():
            self._seen_revoked(name)  # its lease was removed: nothing can renew it any more
        return answer

    def _revoke(self, effect: StoreCall[Any], lease: Lease) -> Routine:
        name = lease.incarnation
        self.cluster.checker.revokes(self.seen[name][0])
        done = yield from self._use_store(effect)
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
        process.spawn(self._coordinate())

    def _new_driver(self) -> RunDriver:
        return RunDriver(
            self.machine.clock,
            StoryLog(self.cluster, self.name),
            keep_over_s=KEEP_OVER_LEASES * self.cluster.policy.lease_ttl_s,
            idle_s=self.cluster.policy.lease_ttl_s,  # hints are lost here, which no store of ours does
        )

    def _coordinate(self) -> Routine:
        """Begin with what the store says again whenever it was lost, as the shipped thread does."""
        while not self.deposed:
            table = SimulatedTable(self.store.connect(self.machine), self.cluster.call_s())
            try:
                if not (yield from awaited(self._take_up(table))):
                    yield self._hints, 0.1 * self.cluster.policy.lease_ttl_s
                    self._hints.items.clear()
                    continue
                self._driver = self._new_driver()
                yield from self.run(self._driver.coordinate())
            except StoreLostError:
                yield RETRY_S
            else:
                self.seen.clear()  # the run is removed, and another one may begin
            finally:
                table.close()
        self.store.unlisten(self._hints)

    async def _take_up(self, table: SimulatedTable) -> bool:
        """A run is taken up when there is more of it than its name."""
        life = await life_of(table, KEYS) if RUN in await begun_runs(table) else None
        if life is not None:
            invalid = self.cluster.reports_invalid(self.name)
            self.records = CoordinatorRecords(table, LifeKeys(KEYS, life), invalid)
        return life is not None

    def _use_store(self, effect: StoreCall[Any]) -> Routine:
        if effect.method is CoordinatorRecords.remove_run and not self.cluster.endpoint.may_remove:
            raise StoreLostError("the operator looks at the records of the run that is over")
        return (yield from super()._use_store(effect))

    def _wait_for_hints(self, until_s: float) -> Routine:
        plan = self._driver.plan
        if self._driver.over and plan is not None and not self.cluster.may_go_on(plan):
            self.cluster.run_over(self)
            self.deposed = not self.cluster.goes_on_here
        hints = yield from super()._wait_for_hints(until_s)
        newest = self.store.plan
        if plan is not None and newest is not None and newest.version > plan.version:
            raise RetiredError("another coordinator has published")  # by hosting "cluster" there may be two
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
