"""An agent's part in the election of the coordinator in etcd: the shipped driver, on the simulated etcd."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, cast

from elastic_agent.protocol.leases import RevisionTimes
from elastic_agent.rendezvous.backends.etcd.election import PATIENCE_S, Election
from elastic_agent.rendezvous.run_history import RunHistoryStore
from elastic_agent.transport import CoordinatorRecords, LifeKeys, StoreLostError
from elastic_agent.transport.etcd import Leadership as ShippedLeadership
from elastic_agent.transport.etcd import NotLeaderError

from .coordination import Coordination, StoryLog
from .etcd import DEPOSED, EtcdConnection, EtcdTable
from .kernel import Routine
from .machine import RUN
from .store import KEYS
from .waits import SimulatedWaits, performed

if TYPE_CHECKING:
    from .agent import Agent
    from .cluster import Cluster
    from .etcd import Etcd


class SimulatedElection(Election):
    """Runs the election as long as its agent lives."""

    def __init__(self, cluster: Cluster, agent: Agent) -> None:
        waits = SimulatedWaits(agent.machine, agent.process)
        super().__init__(
            RUN,
            "",
            self._never_dialled,
            cast(RunHistoryStore, None),  # that of the term
            cluster.policy.lease_ttl_s,
            clock=agent.machine.clock,
            waits=waits,
            log=StoryLog(cluster, f"election on {agent.name}"),
        )
        self.cluster = cluster
        self.agent = agent
        self.leadership: Leadership | None = None
        """The newest of this agent."""
        self.revisions = RevisionTimes()
        self._connection: EtcdConnection | None = None
        self._task = waits.spawn(self.run)

    def saw(self, store_id: str, revision: int) -> None:
        """An answer of an etcd, or news, named this revision."""
        self.revisions.saw(store_id, revision, self.agent.machine.clock())

    def stop(self) -> Routine:
        """Take no part any more."""
        self._task.cancel()
        if self.leads:
            assert self.leadership is not None  # it leads
            yield from self.leadership.give_back()

    @property
    def leads(self) -> bool:
        """Return whether this agent is the coordinator, as far as it knows."""
        return self._leadership is not None

    # -- the simulated etcd ---------------------------------------------------------------------

    async def _never_dialled(self) -> Any:
        raise NotImplementedError

    async def _connect(self) -> None:
        self._connection = await performed(self._new_connection())

    def _new_connection(self) -> Routine:
        connection = self.cluster.endpoint.connect(self.agent)
        if not isinstance(connection, EtcdConnection):
            raise StoreLostError
        yield from connection.call("read", (), timeout_s=self.cluster.call_s())
        connection.store.watch_leader(self)
        return connection

    async def _await_no_leader(self) -> str | None:
        patience_s = min(PATIENCE_S, self.cluster.watch_s())
        life: str | None = await self._call(
            "await_no_leader", patience_s, timeout_s=patience_s + self.cluster.call_s()
        )
        return life

    async def _campaign(self, life: str) -> ShippedLeadership | None:
        args = (self.agent.name, self.agent.machine, life)
        since = await self._call("campaign_for", *args, timeout_s=self.cluster.call_s())
        if since is None:
            return None
        assert self._connection is not None  # it answered
        self.leadership = Leadership(self, self._connection, life, since)
        self.history_store = self.leadership.disk
        return cast(ShippedLeadership, self.leadership)

    async def _give_back(self, leadership: ShippedLeadership) -> None:
        await leadership.resign()

    async def _call(self, method: str, *args: Any, timeout_s: float) -> Any:
        assert self._connection is not None  # connected first
        return await performed(self._connection.call(method, *args, timeout_s=timeout_s))


class Leadership(Coordination):
    """One agent's time as coordinator: one connection, which ends with it."""

    store: Etcd

    def __init__(
        self, candidate: SimulatedElection, connection: EtcdConnection, life: str, since: int
    ) -> None:
        agent = candidate.agent
        super().__init__(candidate.cluster, agent.machine, agent.process, connection.store)
        self.name = f"term {since} on {agent.name}"
        self.ttl_s = self.store.leader_key_s
        self._since = since
        self._link = connection
        connection.is_leaders = True
        table = EtcdTable(
            connection, self.cluster.call_s(), writes=("decree", since), revisions=candidate.revisions
        )
        self.records = self.watched(
            CoordinatorRecords(table, LifeKeys(KEYS, life), self.cluster.reports_invalid(self.name))
        )
        self._keeping: EtcdConnection | None = None
        """The keeper's own connection."""
        self.store.listen(self._hints, self.machine)

    async def resign(self) -> None:
        await performed(self.give_back())

    def give_back(self) -> Routine:
        """End this term, and give the leader key back, if etcd can be reached."""
        self.cluster.story(self.name, "ends")
        self.store.unlisten(self._hints)
        self._link.close()
        connection = self._connect()
        with contextlib.suppress(StoreLostError):
            yield from connection.call("resign", self._since, timeout_s=self.cluster.call_s())
        connection.close()

    def _connect(self) -> EtcdConnection:
        connection = self.store.connect(self.machine)
        connection.is_leaders = True
        return connection

    def _use_store(self, name: str, request: Any) -> Routine:
        answer = yield from super()._use_store(name, request)
        if name == "remove_run":
            self.cluster.run_over(self)
        return answer

    async def wait(self, timeout_s: float) -> Any:
        return await performed(self.wait_for(timeout_s))

    async def store_age_s(self) -> float:
        age_s: float = await performed(self._link.call("age_s", timeout_s=self.cluster.call_s()))
        return age_s

    # -- the leader key -------------------------------------------------------------------------

    async def keep_alive(self) -> bool:
        is_kept: bool = await self._call_to_keep("keep_office", self._since)
        return is_kept

    async def write_mark(self) -> None:
        if await self._call_to_keep("decree", self._since, "mark", ()) == DEPOSED:
            raise NotLeaderError("another agent leads")

    async def _call_to_keep(self, method: str, *args: Any) -> Any:
        if self._keeping is None or self._keeping.closed:
            self._keeping = self._connect()
        return await performed(self._keeping.call(method, *args, timeout_s=self.store.leader_key_s / 4))
