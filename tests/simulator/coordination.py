"""A coordinator: the shipped driver of a run and the shipped records, in a process of the simulated universe."""

from __future__ import annotations

import sys
from collections.abc import Collection, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from elastic_agent.protocol.records import Lease, Member, Plan
from elastic_agent.rendezvous.coordinator_driver import LEAST_WAIT_S, RunDriver
from elastic_agent.rendezvous.run_history import RunHistoryStore
from elastic_agent.transport import CoordinatorRecords, LifeKeys, StoreLostError, begun_runs, life_of

from .kernel import Inbox, Process, Routine
from .machine import RUN, Machine
from .store import KEYS, SimulatedTable, Store
from .waits import HAIR_S, awaited, performed

if TYPE_CHECKING:
    from .cluster import Cluster

PATIENCE = 2000
"""How many calls a driver may make before it must wait."""

RETRY_S = 0.05
KEEP_OVER_LEASES = 3.0
"""How long the records of a run that is over stay."""


class Coordination:
    """What one coordinator's driver is given: the shipped records, the simulated disk, and hints."""

    def __init__(self, cluster: Cluster, machine: Machine, process: Process, store: Store) -> None:
        self.machine = machine
        self.process = process
        self.cluster = cluster
        self.store = store
        self.name = f"coordinator on {machine.name}"
        self.seen: dict[str, tuple[Member, Lease]] = {}
        """What this coordinator was told, kept apart from its own memory for the checker."""
        self._hints = Inbox(cluster.kernel)
        self._calls = 0
        """How many the driver has made since it waited."""

    @property
    def disk(self) -> RunHistoryStore:
        """This machine's run history, as the driver uses it."""
        return cast(RunHistoryStore, _Disk(self))

    def watched(self, records: CoordinatorRecords) -> CoordinatorRecords:
        """Return the same records, each call of which is told to the universe first."""
        return cast(CoordinatorRecords, _WatchedRecords(self, records))

    def call(self, name: str, *args: Any, request: Coroutine[Any, Any, Any]) -> Routine:
        """Call a method of the records."""
        if name == "publish":
            self.cluster.checker.intends(args[0], self.seen)
            self.cluster.checker.publishes(self.machine, args[0])
        yield from self._comes_to(name)
        match name:
            case "publish":
                yield from self._use_store(name, request)
                return (yield from self._reached("published"))
            case "revoke":
                return (yield from self._revoke(request, args[0]))
            case "read":
                return (yield from self._read(request, args[0]))
            case "read_leases":
                return (yield from self._read_leases(request))
            case _:
                return (yield from self._use_store(name, request))

    def save(self, history: Plan) -> Routine:
        """Write to the disk, or raise OSError."""
        yield from self._comes_to("save")
        machine = self.machine
        try:
            kept = yield from machine.history_store(self.process).save_within_time(history)
        except OSError:
            if machine.not_on_disk is None or machine.not_on_disk.rank < history.rank:
                machine.not_on_disk = history
            raise
        self.cluster.checker.saved(history, kept)

    def load(self) -> Routine:
        """Read what the disk has."""
        yield from self._comes_to("load")
        return self.machine.disk

    def wait_for(self, timeout_s: float) -> Routine:
        """Wait for hints."""
        yield from self._comes_to("wait")
        self._calls = 0
        hint = yield self._hints, self.machine.real_s(timeout_s) + HAIR_S
        hints = dict.fromkeys(heard for heard in (hint, *self._hints.items) if heard is not None)
        self._hints.items.clear()
        return tuple(hints)

    def _comes_to(self, point: str) -> Routine:
        self._calls += 1
        yield from self._reached(point)
        if self._calls > PATIENCE:
            self.cluster.checker.broken("liveness", f"the coordinator does not come to rest: {point}")

    def _reached(self, point: str) -> Routine:
        self.cluster.at(point, None)
        if self.cluster.strikes_at(point, self.process):
            yield 0.0

    def _use_store(self, name: str, request: Coroutine[Any, Any, Any]) -> Routine:
        """Perform it; between any two of its requests the process may be frozen or killed."""
        requests = awaited(request)
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

    def _read_leases(self, request: Coroutine[Any, Any, Any]) -> Routine:
        answer = yield from self._use_store("read_leases", request)
        for name in answer.keys() & self.seen.keys():
            self.seen[name] = (self.seen[name][0], answer[name])
        return answer

    def _read(self, request: Coroutine[Any, Any, Any], incarnations: Collection[str] | None) -> Routine:
        answer = yield from self._use_store("read", request)
        for name in answer.members.keys() & answer.leases.keys():
            self.seen[name] = (answer.members[name], answer.leases[name])
        for name in {*(incarnations or ())} & self.seen.keys() - answer.leases.keys():
            self._seen_revoked(name)  # its lease was removed: nothing can renew it any more
        return answer

    def _revoke(self, request: Coroutine[Any, Any, Any], lease: Lease) -> Routine:
        name = lease.incarnation
        self.cluster.checker.revokes(self.seen[name][0])
        done = yield from self._use_store("revoke", request)
        if done:
            self._seen_revoked(name)
        return done

    def _seen_revoked(self, name: str) -> None:
        member, lease = self.seen[name]
        self.seen[name] = (member, lease.revoke())


class _WatchedRecords:
    def __init__(self, coordination: Coordination, records: CoordinatorRecords) -> None:
        self._coordination = coordination
        self._records = records

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name)

    async def _call(self, name: str, *args: Any) -> Any:
        request = getattr(self._records, name)(*args)
        try:
            return await performed(self._coordination.call(name, *args, request=request))
        finally:
            request.close()  # it may not have begun


class _Disk:
    def __init__(self, coordination: Coordination) -> None:
        self._coordination = coordination

    async def load(self, run_id: str) -> Plan | None:
        history: Plan | None = await performed(self._coordination.load())
        return history

    async def save(self, run_id: str, history: Plan) -> None:
        await performed(self._coordination.save(history))


class HostedCoordinator(Coordination):
    """The coordinator beside a c10d store, in a thread of its process, until the run is over."""

    def __init__(self, cluster: Cluster, machine: Machine, process: Process, store: Store) -> None:
        super().__init__(cluster, machine, process, store)
        self._driver: RunDriver | None = None
        self._done = False
        store.listen(self._hints, machine)
        process.spawn(self._coordinate())

    def _new_driver(self, records: CoordinatorRecords) -> RunDriver:
        return RunDriver(
            RUN,
            self.watched(records),
            self.disk,
            self._wait_for_hints,
            self.machine.clock,
            StoryLog(self.cluster, self.name),
            keep_over_s=KEEP_OVER_LEASES * self.cluster.policy.lease_ttl_s,
            idle_s=self.cluster.policy.lease_ttl_s,  # hints are lost here, which no store of ours does
        )

    def _coordinate(self) -> Routine:
        """Begin with what the store says again whenever it was lost, as the shipped thread does."""
        while not self._done:
            table = SimulatedTable(self.store.connect(self.machine), self.cluster.call_s())
            try:
                records = yield from awaited(self._take_up(table))
                if records is None:
                    yield self._hints, 0.1 * self.cluster.policy.lease_ttl_s
                    self._hints.items.clear()
                    continue
                self._driver = self._new_driver(records)
                yield from awaited(self._driver.coordinate())
            except StoreLostError:
                yield RETRY_S
            else:
                self.seen.clear()  # the run is removed, and another one may begin
            finally:
                table.close()
        self.store.unlisten(self._hints)

    async def _take_up(self, table: SimulatedTable) -> CoordinatorRecords | None:
        """A run is taken up when there is more of it than its name."""
        life = await life_of(table, KEYS) if RUN in await begun_runs(table) else None
        if life is None:
            return None
        return CoordinatorRecords(table, LifeKeys(KEYS, life), self.cluster.reports_invalid(self.name))

    def _use_store(self, name: str, request: Coroutine[Any, Any, Any]) -> Routine:
        if name == "remove_run" and not self.cluster.endpoint.may_remove:
            raise StoreLostError("the operator looks at the records of the run that is over")
        return (yield from super()._use_store(name, request))

    async def _wait_for_hints(self, until_s: float) -> Collection[str]:
        wait_s = max(until_s - self.machine.clock(), LEAST_WAIT_S)
        hints: Collection[str] = await performed(self.wait_for(wait_s))
        return hints

    def wait_for(self, timeout_s: float) -> Routine:
        assert self._driver is not None  # it waits
        plan = self._driver.plan
        if self._driver.over and plan is not None and not self.cluster.may_go_on(plan):
            self.cluster.run_over(self)
            self._done = not self.cluster.goes_on_here
            if self._done:
                raise StoreLostError("nothing is left to do")
        return (yield from super().wait_for(timeout_s))


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
