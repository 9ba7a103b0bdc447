"""An agent's part in the election of the coordinator in etcd: the shipped drivers, on the simulated etcd."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from elastic_agent.protocol.codec import decode, encode
from elastic_agent.protocol.records import History
from elastic_agent.protocol.revisions import RevisionTimes
from elastic_agent.rendezvous.backends.etcd.election import (
    AwaitNoLeader,
    Campaign,
    Connect,
    Election,
    KeepAlive,
    ReadEnded,
    ReadStoreAge,
    Resign,
    WaitForMark,
    WriteMark,
    keep_leading,
)
from elastic_agent.rendezvous.coordinator_effects import RemoveRun
from elastic_agent.rendezvous.effects import BackOff, Effect, Sleep
from elastic_agent.transport.etcd import NotLeaderError
from elastic_agent.transport.record_reader import GONE

from .coordination import Coordination, StoryLog
from .driving import drive
from .etcd import DEPOSED, EtcdConnection
from .kernel import Inbox, Routine
from .network import StoreLostError
from .performing import Performer
from .store import Stored

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
        self.spawn(self.election.run())

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
        self.election.stop()
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
        yield from connection.call("hello", timeout_s=self.cluster.call_s())
        connection.store.watch_leader(self)
        return connection

    def _await_no_leader(self, patience_s: float) -> Routine:
        assert self._connection is not None  # connected first
        timeout_s = patience_s + self.cluster.call_s()
        life = yield from self._connection.call("await_no_leader", patience_s, timeout_s=timeout_s)
        return life.encode() if life is not None else None

    def _campaign(self, life: bytes) -> Routine:
        connection = self._connection
        assert connection is not None  # connected first
        sent_s, call_s = self.agent.machine.clock(), self.cluster.call_s()
        args = (self.agent.name, self.agent.machine, life.decode())
        since = yield from connection.call("campaign_for", *args, timeout_s=call_s)
        if since is not None:
            self.leadership = Leadership(self, connection, since, sent_s)
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
        self, candidate: SimulatedElection, connection: EtcdConnection, since: int, elected_s: float
    ) -> None:
        agent = candidate.agent
        super().__init__(candidate.cluster, agent.machine, agent.process, connection.store)
        self.name = f"term {since} on {agent.name}"
        self.marks = Inbox(self.cluster.kernel)
        """An item for each mark that is to be written."""
        self._revisions = candidate.revisions
        self._since = since
        self._link = connection
        self._keeping: EtcdConnection | None = None
        """The keeper's own connection."""
        self.store.listen(self._hints, self.machine)
        self.process.spawn(self._keep(elected_s))

    def end(self, why: str) -> None:
        """Nothing more is done in this term, and nothing waits any longer."""
        if not self.deposed:
            self.cluster.story(self.name, "ends: {}", why)
            self.deposed = True
            self.store.unlisten(self._hints)
            self._link.abort()
            self._hints.put(None)
            self.marks.put(None)

    def resign(self) -> Routine:
        """Give the leader key back, if etcd can be reached."""
        connection = self.store.connect(self.machine)
        with contextlib.suppress(StoreLostError):
            yield from connection.call("resign", self._since, timeout_s=self.cluster.call_s())
        connection.close()

    # -- performing what the leader asks for ----------------------------------------------------

    def _use_store(self, effect: Effect[Any]) -> Routine:
        match effect:
            case ReadEnded():
                ended = yield from self._ask("read_ended")
                return decode(History, ended) if ended is not None else None
            case ReadStoreAge():
                return (yield from self._ask("age_s"))
            case RemoveRun(ended):
                assert ended is not None  # the run is over
                yield from self._write("replace_run", encode(ended))
                self.cluster.run_over(self)
                return True
            case _:
                return (yield from super()._use_store(effect))

    def _ask(self, method: str, *args: Any) -> Routine:
        if self.deposed:
            raise NotLeaderError("leadership is lost")
        return (yield from self._link.call(method, *args, timeout_s=self.cluster.call_s()))

    def _write(self, method: str, *args: Any) -> Routine:
        answer = yield from self._ask("decree", self._since, method, args)
        if answer == DEPOSED:
            raise NotLeaderError("another agent leads")
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

    # -- the leader key -------------------------------------------------------------------------

    def _keep(self, elected_s: float) -> Routine:
        lost = yield from drive(
            keep_leading(self.machine.clock, self.store.leader_key_s, elected_s), self._perform_keeping
        )
        if lost:
            self.end(lost)

    def _perform_keeping(self, effect: Effect[Any]) -> Routine:
        match effect:
            case WaitForMark(until_s):
                wait_s = self.machine.real_s(until_s - self.machine.clock()) + 1e-9
                mark = yield self.marks, wait_s
                self.marks.items.clear()
                return None if self.deposed else mark is not None
            case KeepAlive():
                return (yield from self._call_to_keep("keep_office", self._since))
            case WriteMark():
                if (yield from self._call_to_keep("decree", self._since, "mark", ())) == DEPOSED:
                    raise NotLeaderError("another agent leads")

    def _call_to_keep(self, method: str, *args: Any) -> Routine:
        if self._keeping is None or self._keeping.closed:
            self._keeping = self.store.connect(self.machine)
        return (yield from self._keeping.call(method, *args, timeout_s=self.store.leader_key_s / 4))
