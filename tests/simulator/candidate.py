"""Every agent stands for coordinator of a run in etcd; one at a time is it, until anything goes wrong."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from elastic_agent.protocol.coordinator import Coordinator
from elastic_agent.protocol.revisions import RevisionTimes

from .coordination import Coordination
from .etcd import DEPOSED, EtcdConnection
from .kernel import Routine
from .network import StoreLostError

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

    ends_when_in_doubt = True

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

    @property
    def winding_up(self) -> bool:
        """Whether the run has its verdict, but not everybody alive knows."""
        plan = self.core.plan if self.core is not None else None
        return plan is not None and plan.is_terminal and not self.over and not self.deposed

    def hold(self) -> Routine:
        """Coordinate until deposed, or until the run is over."""
        self.store.listen(self._hints, self.machine)
        self.process.spawn(self._keep())
        try:
            self.core = core = yield from self._begin()
            while not self.deposed:
                yield from self._settle(core)
                if not self.deposed:
                    yield from self._listen(core)
                    yield from self._read_all(core)
        except StoreLostError:
            self.end("gave up")
        self.store.unlisten(self._hints)

    def end(self, why: str) -> None:
        """Nothing more is done in this term."""
        if not self.deposed:
            self.cluster.story(self.name, "ends: {}", why)
        self.deposed = True
        self._link.abort()

    def resign(self) -> Routine:
        """Give the leader key back, if etcd can be reached."""
        connection = self.store.connect(self.machine)
        with contextlib.suppress(StoreLostError):
            yield from connection.call("resign", self._since, timeout_s=self.cluster.call_s())
        connection.close()

    def _new_core(self) -> Routine:
        born_s = self.machine.clock()
        plan = self._plan_in((yield from self._ask("read_plan")))
        age_s = yield from self._ask("age_s")
        return Coordinator(born_s, plan, self.machine.disk, self.machine.clock() - age_s)

    def _ask(self, method: str, *args: Any) -> Routine:
        if self.deposed:
            raise DeposedError
        return (yield from self._link.call(method, *args, timeout_s=self.cluster.call_s()))

    def _decree(self, method: str, *args: Any) -> Routine:
        answer = yield from self._ask("decree", self._since, method, args)
        if answer == DEPOSED:
            raise DeposedError
        return answer

    def _clear_away(self) -> Routine:
        yield from self._decree("remove_run")

    def _written_by(self, revision: int) -> float | None:
        return self._revisions.written_by(self.store.store_id, revision)

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
