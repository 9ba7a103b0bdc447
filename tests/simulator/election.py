"""An agent's part in the election of the coordinator in etcd: the shipped drivers, on the simulated etcd."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from elastic_agent.protocol.revisions import RevisionTimes
from elastic_agent.rendezvous.backends.etcd.election import (
    AwaitNoLeader,
    Campaign,
    Connect,
    Election,
    LeaderCall,
    Resign,
    WaitForMark,
    keep_leading,
)
from elastic_agent.rendezvous.coordinator_effects import StoreCall
from elastic_agent.rendezvous.effects import BackOff, Effect, Sleep
from elastic_agent.transport import CoordinatorRecords, LifeKeys, StoreLostError
from elastic_agent.transport.etcd import NotLeaderError, leadership

from .coordination import Coordination, StoryLog
from .etcd import DEPOSED, EtcdConnection, EtcdTable
from .kernel import Inbox, Routine, Task
from .performing import HAIR_S, Performer, drive
from .store import KEYS

if TYPE_CHECKING:
    from .agent import Agent
    from .cluster import Cluster
    from .etcd import Etcd


class SimulatedElection(Performer):
    """Runs the election as long as its agent lives."""

    def __init__(self, cluster: Cluster, agent: Agent) -> None:
        super().__init__(agent.machine, agent.process)
        self.cluster = cluster
        self.agent = agent
        self.leadership: Leadership | None = None
        self.revisions = RevisionTimes()
        self.election = Election(agent.machine.clock, StoryLog(cluster, f"election on {agent.name}"))
        self._connection: EtcdConnection | None = None
        self._task = self.spawn(self.election.run())

    @property
    def winding_up(self) -> bool:
        """Whether this agent coordinates a run that is over, but not every live node knows it."""
        return self.election.winding_up

    def saw(self, store_id: str, revision: int) -> None:
        """An answer of an etcd, or news, named this revision."""
        self.revisions.saw(store_id, revision, self.agent.machine.clock())

    def mark(self) -> None:
        """Its agent's lease was renewed."""
        if self.leadership is not None:
            self.leadership.marks.put(True)

    def stop(self) -> Routine:
        """Take no part any more."""
        self._task.cancel()
        if self.leadership is not None:
            self.leadership.end("its agent departs")
            yield from self.leadership.resign()

    # -- performing what the election asks for --------------------------------------------------

    def perform(self, effect: Effect[Any]) -> Routine:
        """Perform one effect."""
        match effect:
            case Sleep() | BackOff():
                return (yield from super().perform(effect))
            case Connect():
                self._connection = yield from self._connect()
            case AwaitNoLeader(patience_s):
                return (yield from self._await_no_leader(min(patience_s, self.cluster.watch_s())))
            case Campaign(life):
                return (yield from self._campaign(life))
            case Resign():
                yield from self._resign()
            case _:
                assert self.leadership is not None  # elected
                return (yield from self.leadership.perform(effect))

    def _connect(self) -> Routine:
        connection = self.cluster.endpoint.connect(self.agent)
        if not isinstance(connection, EtcdConnection):
            raise StoreLostError
        yield from connection.call("read", (), timeout_s=self.cluster.call_s())
        connection.store.watch_leader(self)
        return connection

    def _await_no_leader(self, patience_s: float) -> Routine:
        assert self._connection is not None  # connected first
        timeout_s = patience_s + self.cluster.call_s()
        return (yield from self._connection.call("await_no_leader", patience_s, timeout_s=timeout_s))

    def _campaign(self, life: str) -> Routine:
        connection = self._connection
        assert connection is not None  # connected first
        sent_s, call_s = self.agent.machine.clock(), self.cluster.call_s()
        args = (self.agent.name, self.agent.machine, life)
        since = yield from connection.call("campaign_for", *args, timeout_s=call_s)
        if since is not None:
            self.leadership = Leadership(self, connection, life, since, sent_s)
        return since is not None

    def _resign(self) -> Routine:
        leadership, self.leadership = self.leadership, None
        assert leadership is not None  # elected
        leadership.end("is given up")
        yield from leadership.resign()


class Leadership(Coordination):
    """One agent's time as coordinator: one connection, which ends with it."""

    store: Etcd

    def __init__(
        self,
        candidate: SimulatedElection,
        connection: EtcdConnection,
        life: str,
        since: int,
        elected_s: float,
    ) -> None:
        agent = candidate.agent
        super().__init__(candidate.cluster, agent.machine, agent.process, connection.store)
        self.name = f"term {since} on {agent.name}"
        self.marks = Inbox(self.cluster.kernel)
        """An item for each mark that is to be written."""
        self._since = since
        self._link = connection
        connection.is_leaders = True
        table = EtcdTable(
            connection, self.cluster.call_s(), writes=("decree", since), revisions=candidate.revisions
        )
        self.records = CoordinatorRecords(
            table, LifeKeys(KEYS, life), self.cluster.reports_invalid(self.name)
        )
        self._keeping: EtcdConnection | None = None
        """The keeper's own connection."""
        self.store.listen(self._hints, self.machine)
        self._keeper: Task | None = self.process.spawn(self._keep(elected_s))

    def end(self, why: str) -> None:
        """Nothing more is done in this term, and nothing waits any longer."""
        if not self.deposed:
            self.cluster.story(self.name, "ends: {}", why)
            self.deposed = True
            self.store.unlisten(self._hints)
            self._link.abort()
            self._hints.put(None)
            if self._keeper is not None:
                self._keeper.cancel()

    def resign(self) -> Routine:
        """Give the leader key back, if etcd can be reached."""
        connection = self._connect()
        with contextlib.suppress(StoreLostError):
            yield from connection.call("resign", self._since, timeout_s=self.cluster.call_s())
        connection.close()

    def _connect(self) -> EtcdConnection:
        connection = self.store.connect(self.machine)
        connection.is_leaders = True
        return connection

    # -- performing what the leader asks for ----------------------------------------------------

    def perform(self, effect: Effect[Any]) -> Routine:
        try:
            if isinstance(effect, LeaderCall):
                assert effect.method is leadership.Leadership.store_age_s
                return (yield from self._link.call("age_s", timeout_s=self.cluster.call_s()))
            answer = yield from super().perform(effect)
        except StoreLostError:
            if self.deposed:
                raise NotLeaderError("leadership is lost") from None
            raise
        if isinstance(effect, StoreCall) and effect.method is CoordinatorRecords.remove_run:
            self.cluster.run_over(self)
        return answer

    # -- the leader key -------------------------------------------------------------------------

    def _keep(self, elected_s: float) -> Routine:
        lost = yield from drive(
            keep_leading(self.machine.clock, self.store.leader_key_s, elected_s), self._perform_keeping
        )
        self._keeper = None
        self.end(lost)

    def _perform_keeping(self, effect: Effect[Any]) -> Routine:
        match effect:
            case WaitForMark(until_s):
                wait_s = self.machine.real_s(until_s - self.machine.clock()) + HAIR_S
                mark = yield self.marks, wait_s
                self.marks.items.clear()
                return mark is not None
            case LeaderCall(leadership.Leadership.keep_alive):
                return (yield from self._call_to_keep("keep_office", self._since))
            case LeaderCall(leadership.Leadership.write_mark):
                if (yield from self._call_to_keep("decree", self._since, "mark", ())) == DEPOSED:
                    raise NotLeaderError("another agent leads")

    def _call_to_keep(self, method: str, *args: Any) -> Routine:
        if self._keeping is None or self._keeping.closed:
            self._keeping = self._connect()
        return (yield from self._keeping.call(method, *args, timeout_s=self.store.leader_key_s / 4))
