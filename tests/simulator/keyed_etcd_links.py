"""The shipped links to etcd in virtual time: a node's, the coordinator's, and what an election asks of etcd.

Of the shipped code, only how a channel is dialled and the threads are simulated: a thread is a task of its agent's
process. What ``ElectionThread`` does for the drivers of the election, :class:`KeyedElection` does here.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from elastic_agent.protocol.codec import encode
from elastic_agent.protocol.records import Lease, Plan
from elastic_agent.rendezvous.backends.etcd import backend
from elastic_agent.rendezvous.backends.etcd.backend import Members
from elastic_agent.rendezvous.backends.etcd.election import (
    AwaitNoLeader,
    Campaign,
    Connect,
    KeepAlive,
    LeaderEffect,
    Resign,
    WaitForMark,
    WriteMark,
)
from elastic_agent.rendezvous.coordinator_effects import (
    LEAST_WAIT_S,
    Forget,
    Publish,
    ReadLeases,
    ReadPlan,
    ReadRecords,
    RemoveRun,
    Revoke,
    StoreEffect,
    WriteStatus,
)
from elastic_agent.rendezvous.effects import Effect
from elastic_agent.transport import record_reader
from elastic_agent.transport.base import StoreLostError, UnreachableError
from elastic_agent.transport.etcd import (
    EtcdClient,
    EtcdLink,
    KeptLeases,
    RunKeys,
    await_no_leader,
    campaign_for,
    client,
    keys,
    leadership,
    link,
    watch,
)
from elastic_agent.transport.etcd.api import grpc
from elastic_agent.transport.etcd.client import _Line
from elastic_agent.transport.etcd.sealed import RunLife, RunSecret
from elastic_agent.values import Endpoint, EtcdAccess

from . import fibers
from .election import Leadership, SimulatedElection
from .kernel import Inbox, Kernel, Routine
from .keyed import RUN, SECRET, Watched
from .keyed_etcd import ACCESS, Channel, KeyedEtcd, Stream
from .keyed_links import NodeLink, ignore
from .performing import HAIR_S

if TYPE_CHECKING:
    from .agent import Agent
    from .cluster import Cluster

ENDPOINT = Endpoint("etcd", 2379)


@contextlib.contextmanager
def etcd_in_virtual_time(kernel: Kernel, seed: int) -> Iterator[None]:
    """The shipped links use the simulator's time, threads and random numbers for a while, and log nothing."""
    random = Random(f"random names {seed}")
    names = SimpleNamespace(token_hex=lambda size: random.randbytes(size).hex())
    clock = SimpleNamespace(monotonic=lambda: _host().machine.clock())
    silent = mock.MagicMock()
    with contextlib.ExitStack() as patches:
        for module, name, value in (
            (client, "time", clock),
            (link, "time", clock),
            (backend, "time", clock),
            (keys, "secrets", names),
            (watch, "threading", SimpleNamespace(Thread=VirtualThread)),
            (watch, "queue", SimpleNamespace(SimpleQueue=VirtualQueue, Empty=queue.Empty)),
            (record_reader, "get_logger", silent),
            (leadership, "get_logger", silent),
            (EtcdClient, "dial", staticmethod(dial)),
        ):
            patches.enter_context(mock.patch.object(module, name, value))
        yield


def _host() -> Agent:
    """The agent whose code calls this."""
    fiber = fibers.current()
    assert fiber is not None  # only blocking code does
    agent: Agent = fiber.host
    return agent


class VirtualThread:
    """A thread of the agent whose code starts it."""

    def __init__(self, target: Callable[[], None], name: str, *, daemon: bool) -> None:
        self._target = target

    def start(self) -> None:
        """Begin."""
        host = _host()
        host.process.spawn(fibers.blocking(self._target, host))


class VirtualQueue:
    """A queue between blocking code of one agent."""

    def __init__(self) -> None:
        self._machine = _host().machine
        self._inbox = Inbox(self._machine.kernel)

    def put(self, item: Any) -> None:
        """Add an item."""
        self._inbox.put(item)

    def get(self, *, block: bool, timeout: float) -> Any:
        """The next item. Raises queue.Empty."""
        items = self._inbox.items
        if items:
            return items.popleft()
        item = fibers.wait_for(self._next(timeout)) if block else None
        if item is None:
            raise queue.Empty
        return item

    def _next(self, timeout_s: float) -> Routine:
        return (yield self._inbox, self._machine.real_s(timeout_s) + HAIR_S)


class SimulatedLine(_Line):
    """A client's line over a simulated channel."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.kv = SimpleNamespace(Range=self._call("find"), Txn=self._call("transact"))
        self.leases = SimpleNamespace(
            LeaseGrant=self._call("grant"),
            LeaseTimeToLive=self._call("time_to_live"),
            LeaseRevoke=self._call("revoke_grant"),
        )
        self.keep_alive = self._call("keep_alive")
        self.token = None
        self.users = 0
        self._lock = contextlib.nullcontext()  # type: ignore[assignment]

    def _call(self, method: str) -> Callable[..., Any]:
        def call(request: Any, *, timeout: float, metadata: Any) -> Any:
            return fibers.wait_for(self.channel.ask(method, request, timeout))

        return call

    def watch(self, request: Any, *, timeout: float | None, metadata: Any) -> Stream:
        """A stream of what changes."""
        return self.channel.follow(request, timeout)


def dial(endpoint: Endpoint, access: EtcdAccess, timeout_s: float) -> EtcdClient:
    """In place of ``EtcdClient.dial``: a connection of the calling agent's, when etcd answers."""
    agent = _host()
    channel = agent.cluster.endpoint.connect(agent)
    if channel is None:
        raise UnreachableError("nothing answers")
    assert isinstance(channel, Channel)
    try:
        fibers.wait_for(channel.ask("greet", None, timeout_s))
    except grpc.RpcError as error:
        channel.close()
        raise UnreachableError(str(error)) from None
    return EtcdClient(SimulatedLine(channel), endpoint, access, agent.machine.name, timeout_s)


class WatchedSecret(RunSecret):
    """The secret of an agent, whose records are checked as they are taken and given."""

    def __init__(self, agent: Agent, root: str) -> None:
        super().__init__(SECRET, root)
        self._agent = agent

    def records(self, life: RunLife | None) -> Any:
        """For a new connection."""
        made = super().records(life)
        store = self._agent.cluster.endpoint.store
        assert isinstance(store, KeyedEtcd)
        return Watched(made, store.epoch(life), self._agent.name, in_order=True)


class EtcdNodeLink(NodeLink):
    """A node's link: see ``EtcdLink``. Its methods are sub-routines of the calling task."""

    def __init__(self, made: EtcdLink, host: Agent) -> None:
        super().__init__(None, made, host)


class KeyedElection(SimulatedElection):
    """An agent's part in the election, and its connection to etcd, over the shipped transport."""

    leadership: KeyedTerm | None

    def __init__(self, cluster: Cluster, agent: Agent) -> None:
        self._members = Members(ENDPOINT, ACCESS, cluster.call_s())
        self._keys = RunKeys(ACCESS.prefix, RUN, SECRET)
        self._keys.secret = WatchedSecret(agent, f"{self._keys.shown}/")
        self._kept = KeptLeases(agent.policy.lease_ttl_s)
        self._client: EtcdClient | None = None
        super().__init__(cluster, agent)

    def blocking(self, code: Callable[[], Any]) -> Routine:
        """Run this code in a thread of the agent."""
        return fibers.blocking(code, self.agent)

    def dial(self) -> Routine:
        """The node's link, as ``EtcdBackend.connect`` makes it."""
        made = yield from self.blocking(self._dial_link)
        return EtcdNodeLink(made, self.agent)

    def _dial_link(self) -> EtcdLink:
        connection, store = self._members.dial()
        try:
            return EtcdLink(
                connection,
                self._keys,
                store,
                self._kept,
                ignore,
                let_go=lambda: self._members.suspect(connection),
            )
        except BaseException:
            connection.close()
            raise

    def stop(self) -> Routine:
        """Take no part any more."""
        self.election.stop()
        if self.leadership is not None:
            yield from self.leadership.resign()
        self._close()

    # -- performing what the election asks for --------------------------------------------------

    def perform(self, effect: Effect[Any]) -> Routine:
        """Perform one effect."""
        match effect:
            case Connect():
                self._close()
                self._client = (yield from self.blocking(self._members.dial))[0]
            case AwaitNoLeader(patience_s):
                most_s, connection = min(patience_s, self.cluster.watch_s()), self._connected
                return (yield from self.blocking(lambda: await_no_leader(connection, self._keys, most_s)))
            case Campaign(life):
                return (yield from self._campaign_for(life))
            case Resign():
                term, self.leadership = self.leadership, None
                assert term is not None  # elected
                yield from term.resign()
            case _:
                return (yield from super().perform(effect))
        return None

    @property
    def _connected(self) -> EtcdClient:
        assert self._client is not None  # the election connects first
        return self._client

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _campaign_for(self, life: bytes) -> Routine:
        sent_s, ttl_s = self.machine.clock(), self.agent.policy.lease_ttl_s
        connection, who = self._connected, self.agent.name
        won = yield from self.blocking(lambda: campaign_for(connection, self._keys, who, ttl_s, life))
        if won is not None:
            store = self.cluster.endpoint.store
            assert isinstance(store, KeyedEtcd)
            self.leadership = KeyedTerm(self, store, won, sent_s)
        return won is not None


class KeyedTerm(Leadership):
    """One agent's time as coordinator."""

    def __init__(
        self, candidate: KeyedElection, store: KeyedEtcd, won: leadership.Leadership, elected_s: float
    ) -> None:
        agent = candidate.agent
        super(Leadership, self).__init__(candidate.cluster, agent.machine, agent.process, store)
        self.name = f"coordinator on {agent.name}"
        self.marks = Inbox(self.cluster.kernel)
        self.won = won
        self._blocking = candidate.blocking
        self._ttl_s = float(won.ttl_s)
        self._unrevoked: str | None = None
        """Whose lease was not as it was to be revoked."""
        self.process.spawn(self._keep(elected_s))

    def end(self, why: str) -> None:
        """Leadership is lost."""
        if not self.deposed:
            self.cluster.story(self.name, "ends: {}", why)
            self.deposed = True
            self.won.lose(why)
            self.marks.put(None)

    def resign(self) -> Routine:
        """Give the leader key back, if etcd can be reached."""
        self.deposed = True
        self.marks.put(None)
        yield from self._blocking(self.won.resign)

    # -- performing what the leader asks for ----------------------------------------------------

    def _use_store(self, effect: Effect[Any]) -> Routine:
        match effect:
            case RemoveRun(ended):
                assert ended is not None  # the run is over
                yield from self._blocking(lambda: self.won.remove_run(ended))
                self.cluster.run_over(self)
                return True
            case ReadRecords(incarnations):
                yield self.cluster.stumble(self.process)
                snapshot = yield from self._performed(effect)
                self._saw(snapshot, incarnations)
                return snapshot
            case ReadLeases():
                yield self.cluster.stumble(self.process)
                leases = yield from self._performed(effect)
                for name in leases.keys() & self.seen.keys():
                    self.seen[name] = (self.seen[name][0], leases[name])
                return leases
            case Publish(plan):
                return (yield from self._publish_over(effect, plan))
            case Revoke(lease, _):
                return (yield from self._revoke_over(effect, lease))
            case Forget() | WriteStatus() | ReadPlan() | LeaderEffect():
                return (yield from self._performed(effect))
            case _:
                raise TypeError(effect)

    def _performed(self, effect: StoreEffect[Any] | LeaderEffect[Any]) -> Routine:
        return (yield from self._blocking(lambda: effect.perform(self.won)))

    def _saw(self, snapshot: Any, incarnations: Any) -> None:
        for name, lease in snapshot.leases.items():
            member = snapshot.members.get(name)
            if member is not None:
                self.seen[name] = (member, lease)
        for name in {*(incarnations or ())} & self.seen.keys() - snapshot.leases.keys():
            # A lease that another client overwrote goes on for the coordinator until it is due to be revoked.
            if name not in self.store.tampered or name == self._unrevoked:
                self._seen_revoked(name)

    def _publish_over(self, effect: StoreEffect[bool], plan: Plan) -> Routine:
        self.cluster.checker.intends(encode(plan), plan, self.seen)
        yield self.cluster.crash_point("before publishing", self.process)
        done = yield from self._performed(effect)
        yield self.cluster.crash_point("after publishing", self.process)
        return done

    def _revoke_over(self, effect: StoreEffect[bool], lease: Lease) -> Routine:
        self.cluster.checker.revokes(self.seen[lease.incarnation][0])
        done = yield from self._performed(effect)
        self._unrevoked = None if done else lease.incarnation
        if done:
            self._seen_revoked(lease.incarnation)
        return done

    def _wait(self, until_s: float) -> Routine:
        self._effects = 0
        if self.deposed:
            raise StoreLostError("this agent is resigning as the coordinator of the run")
        wait_s = max(LEAST_WAIT_S, until_s - self.machine.clock())
        return (yield from self._blocking(lambda: self.won.wait(wait_s)))

    # -- the leader key -------------------------------------------------------------------------

    @property
    def _key_lives_s(self) -> float:
        return self._ttl_s

    def _perform_keeping(self, effect: Effect[Any]) -> Routine:
        match effect:
            case WaitForMark():
                return (yield from super()._perform_keeping(effect))
            case KeepAlive() | WriteMark():
                return (yield from self._performed(effect))
