"""Every agent stands for coordinator of a run in etcd; one at a time is it, until anything goes wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from elastic_agent.protocol.records import Plan
from elastic_agent.protocol.revisions import RevisionTimes
from elastic_agent.transport.record_reader import GONE

from .coordination import Coordination
from .driving import drive
from .etcd import DEPOSED, EtcdConnection
from .kernel import Routine
from .network import StoreLostError
from .store import Stored

if TYPE_CHECKING:
    from .agent import Agent
    from .cluster import Cluster

KEEPING_PER_OFFICE = 4
RETRY_S = 0.1


class DeposedError(StoreLostError):
    """Another agent coordinates the run now."""


class Candidate:
    """Stands as long as its agent lives."""

    def __init__(self, cluster: Cluster, agent: Agent) -> None:
        self.cluster = cluster
        self.agent = agent
        self.term: Term | None = None
        self.revisions = RevisionTimes()
        self._stopped = False
        agent.process.spawn(self._stand())

    @property
    def winding_up(self) -> bool:
        """Whether this agent coordinates a run that is over, but not everybody alive knows."""
        return self.term is not None and self.term.winding_up

    def saw(self, store_id: str, revision: int) -> None:
        """An answer of an etcd, or news, named this revision."""
        self.revisions.saw(store_id, revision, self.agent.machine.clock())

    def _goes_on(self) -> bool:
        return not self._stopped and not self.cluster.over

    def _stand(self) -> Routine:
        while self._goes_on():
            connection = self.cluster.endpoint.connect(self.agent)
            try:
                if isinstance(connection, EtcdConnection):
                    yield from self._stand_with(connection)
            except StoreLostError:
                pass
            yield RETRY_S * (0.5 + self.cluster.kernel.random.random())

    def _stand_with(self, connection: EtcdConnection) -> Routine:
        call_s = self.cluster.call_s()
        machine = self.agent.machine
        yield from connection.call("hello", timeout_s=call_s)
        connection.store.watch_leader(self)
        while self._goes_on():
            yield from connection.call("await_vacancy", timeout_s=self.cluster.watch_s())
            sent_s = machine.clock()
            since = yield from connection.call("stand", self.agent.name, machine, timeout_s=call_s)
            if since is None:
                continue
            term = Term(self, connection, since, sent_s)
            if self._goes_on():
                self.term = term
                yield from term.hold()
            self.term = None
            yield from term.resign()
            return

    def mark(self) -> None:
        """Its agent's lease was renewed."""
        if self.term is not None and not self.term.deposed:
            self.agent.process.spawn(self.term.mark())

    def stop(self) -> Routine:
        """Give the office up."""
        self._stopped = True
        if self.term is not None:
            self.term.end("its agent departs")
            yield from self.term.resign()


class Term(Coordination):
    """One agent's time in office: one connection, one ``Coordinator``; any error ends it."""

    def __init__(
        self, candidate: Candidate, connection: EtcdConnection, since: int, elected_s: float
    ) -> None:
        agent = candidate.agent
        super().__init__(candidate.cluster, agent.machine, agent.process, connection.store)
        self._revisions = candidate.revisions
        self.name = f"term {since} on {agent.name}"
        self._since = since
        self._link = connection
        self._kept_s = elected_s
        self.winding_up = False
        """Whether the run has its verdict, but not everybody alive knows."""

    def hold(self) -> Routine:
        """Coordinate until deposed, or until the run is over."""
        self.store.listen(self._hints, self.machine)
        self.process.spawn(self._keep())
        try:
            age_s = yield from self._ask("age_s")
            self.driver = self._new_driver(self.machine.clock() - age_s)
            yield from drive(self.driver.coordinate_until_over(), self._perform)
            self.cluster.run_over(self)
            self.deposed = True
        except StoreLostError:
            self.end("gave up")
        self.winding_up = False
        self.store.unlisten(self._hints)

    def end(self, why: str) -> None:
        """Nothing more is done in this term."""
        if not self.deposed:
            self.cluster.story(self.name, "ends: {}", why)
        self.deposed = True
        self.winding_up = False
        self._link.abort()

    def _wait(self, until_s: float) -> Routine:
        self.winding_up = self.driver.winding_up
        return (yield from super()._wait(until_s))

    def _publish(self, plan: Plan) -> Routine:
        self.winding_up |= plan.is_terminal  # before its own agent can read that, and end
        return (yield from super()._publish(plan))

    def resign(self) -> Routine:
        """Give the leader key back, if etcd can be reached."""
        connection = self.store.connect(self.machine)
        with contextlib.suppress(StoreLostError):
            yield from connection.call("resign", self._since, timeout_s=self.cluster.call_s())
        connection.close()

    def _ask(self, method: str, *args: Any) -> Routine:
        if self.deposed:
            raise DeposedError
        return (yield from self._link.call(method, *args, timeout_s=self.cluster.call_s()))

    def _write(self, method: str, *args: Any) -> Routine:
        answer = yield from self._ask("decree", self._since, method, args)
        if answer == DEPOSED:
            raise DeposedError
        return answer

    def _find(self, incarnations: Collection[str] | None) -> Routine:
        if incarnations is not None:
            return (yield from super()._find(incarnations))
        leases = yield from self._ask("range_leases")
        members = yield from self._ask("range_members")
        return {
            name: Stored(members.get(name, GONE), *leases.get(name, (GONE, 0)))
            for name in {**members, **leases}
        }

    def _written_by(self, found: dict[str, Stored]) -> dict[str, float]:
        store_id = self.store.store_id
        known = {name: self._revisions.written_by(store_id, one.written_in) for name, one in found.items()}
        return {name: at_s for name, at_s in known.items() if at_s is not None}

    def mark(self) -> Routine:
        """Write the leader key anew, so that every candidate knows by when all before it was written."""
        connection = self.store.connect(self.machine)
        with contextlib.suppress(StoreLostError):
            args = (self._since, "mark", ())
            yield from connection.call("decree", *args, timeout_s=self.cluster.call_s())
        connection.close()

    def _keep(self) -> Routine:
        """Keep the leader key alive; without it, or without an answer for its whole time, the term ends."""
        office_s = self.store.office_s  # type: ignore[attr-defined]
        connection = self.store.connect(self.machine)
        while True:
            yield self.machine.real_s(office_s / KEEPING_PER_OFFICE)
            if self.deposed:
                return
            sent_s = self.machine.clock()
            try:
                if connection.closed:
                    connection = self.store.connect(self.machine)
                kept = yield from connection.call(
                    "keep_office", self._since, timeout_s=office_s / KEEPING_PER_OFFICE
                )
            except StoreLostError:
                if self.machine.clock() - self._kept_s > office_s:
                    return self.end("the leader key was not kept alive")
                continue
            if not kept:
                return self.end("the leader key is gone")
            self._kept_s = sent_s
