"""The shipped links to a c10d store in virtual time: a node's (:class:`NodeLink`), and the coordinator's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from elastic_agent.protocol.codec import encode
from elastic_agent.protocol.records import Lease, Member, Plan
from elastic_agent.rendezvous.coordinator_effects import (
    Forget,
    Publish,
    ReadLeases,
    ReadPlan,
    ReadRecords,
    RemoveRun,
    Revoke,
    WriteStatus,
)
from elastic_agent.rendezvous.effects import Effect
from elastic_agent.transport import base
from elastic_agent.transport.c10d import C10dCoordinatorLink, C10dLink, StoreClient, greeting, link
from elastic_agent.transport.c10d.greeting import Numbers, greeted
from elastic_agent.transport.c10d.sealed import sealed
from elastic_agent.values import Endpoint

from . import fibers
from .coordination import HostedCoordinator
from .kernel import Inbox, Kernel, Routine
from .keyed import RUN, SECRET, Client, KeyedStore, Watched, opened
from .network import Connection

if TYPE_CHECKING:
    from .machine import Machine

ENDPOINT = Endpoint("store", 29400)
GREETING_S = greeting.ANSWER_S + 1.0


@contextlib.contextmanager
def in_virtual_time(kernel: Kernel, seed: int) -> Iterator[None]:
    """The shipped links use the simulator's time and random numbers for a while, and log nothing."""
    random = Random(f"random names {seed}")
    names = SimpleNamespace(
        token_hex=lambda size: random.randbytes(size).hex(), token_bytes=lambda size: random.randbytes(size)
    )
    clock = SimpleNamespace(monotonic=lambda: kernel.now)
    silent = mock.MagicMock()
    with (
        mock.patch.object(link, "time", clock),
        mock.patch.object(link, "secrets", names),
        mock.patch.object(greeting, "secrets", names),
        mock.patch.object(greeting, "get_logger", silent),
        fibers.on_one_core(),
    ):
        yield


def ignore(problem: str) -> None:
    """Of invalid records nothing is told."""


class NodeLink:
    """A node's link: see ``C10dLink``. Its methods are sub-routines of the calling task."""

    def __init__(self, connection: Connection | None, made: base.NodeLink, host: Any = None) -> None:
        """``connection``: closed with the link, unless it closes that itself; ``host``: whose link it is."""
        self.connection = connection
        self._link = made
        self._host = host
        self.store_id = made.store_id
        self.local_address = made.local_address

    @classmethod
    def dial(cls, connection: Connection, machine: Machine, numbers: Numbers, who: str) -> Routine:
        """Greet the coordinator; errors as for the shipped link."""
        store = connection.store
        assert isinstance(store, KeyedStore)

        def watch(records: Any) -> Watched:
            return Watched(records, store, who, in_order=False)

        def greet(client: StoreClient) -> StoreClient:
            return greeted(client, ENDPOINT, RUN, SECRET, numbers)

        def dial() -> C10dLink:
            client = opened(Client(connection), watch)
            return C10dLink(client, store.store_id, machine.name, RUN, ignore, greet=greet)

        return cls(connection, (yield from fibers.blocking(dial)))

    def close(self) -> None:
        """Let go of the connection."""
        self._link.close()
        if self.connection is not None:
            self.connection.close()

    def _blocking(self, code: Callable[[], Any]) -> Routine:
        return fibers.blocking(code, self._host)

    def register(self, member: Member, lease: Lease) -> Routine:
        """Write the first records."""
        return self._blocking(lambda: self._link.register(member, lease))

    def write(self, member: Member) -> Routine:
        """Replace the member record."""
        return self._blocking(lambda: self._link.write(member))

    def renew(self, expected: Lease, renewed: Lease) -> Routine:
        """Compare-and-set the lease."""
        return self._blocking(lambda: self._link.renew(expected, renewed))

    def read_lease(self, incarnation: str) -> Routine:
        """The lease as it stands, or None."""
        return self._blocking(lambda: self._link.read_lease(incarnation))

    def read_plan(self) -> Routine:
        """The newest plan, or None before the first."""
        return self._blocking(lambda: self._link.read_plan())

    def next_plan(self, after_version: int, timeout_s: float) -> Routine:
        """Wait for a newer plan."""
        return self._blocking(lambda: self._link.next_plan(after_version, timeout_s))


class KeyedCoordinator(HostedCoordinator):
    """The coordinator beside such a store."""

    store: KeyedStore
    _link: C10dCoordinatorLink | None = None

    @property
    def stays(self) -> bool:
        """Always: nodes that come late read the outcome, whatever another client did to it."""
        return True

    def _open_link(self) -> C10dCoordinatorLink:
        """As ``C10dHost.coordinator_link``."""
        if self._connection is None or self._connection.closed:
            self._connection = self.store.connect(self.machine)
        doorkeeper = self.store.doorkeeper

        def watch(records: Any) -> Watched:
            return Watched(records, self.store, self.name, in_order=True)

        client = sealed(opened(Client(self._connection), watch), doorkeeper.seals(RUN))
        return C10dCoordinatorLink(client, RUN, ignore, doorkeeper=doorkeeper)

    def _until_begun(self) -> Routine:
        """A run is taken up when there is more of it than its name."""
        while not self.deposed:
            self._link = self._open_link()
            if (yield from fibers.blocking(self._link.has_begun)):
                break
            yield self._hints, 0.1 * self.cluster.policy.lease_ttl_s
        self._hints.items.clear()

    def _use_store(self, effect: Effect[Any]) -> Routine:
        link = self._link
        assert link is not None  # the run is taken up
        match effect:
            case ReadPlan():
                return (yield from fibers.blocking(link.read_plan))
            case ReadRecords(incarnations):
                yield self.cluster.stumble(self.process)
                return (yield from self._snapshot(lambda: link.read(incarnations), incarnations))
            case ReadLeases():
                yield self.cluster.stumble(self.process)
                leases = yield from fibers.blocking(link.read_leases)
                for name in leases.keys() & self.seen.keys():
                    self.seen[name] = (self.seen[name][0], leases[name])
                return leases
            case Publish(plan):
                return (yield from self._publish_over(link, plan))
            case Revoke(lease, reason):
                self.cluster.checker.revokes(self.seen[lease.incarnation][0])
                done = yield from fibers.blocking(lambda: link.revoke(lease, reason))
                if done:
                    self._seen_revoked(lease.incarnation)
                return done
            case Forget(incarnation):
                yield from fibers.blocking(lambda: link.forget(incarnation))
            case WriteStatus(text):
                yield from fibers.blocking(lambda: link.write_status(text))
            case RemoveRun():
                return (yield from self._remove(link))
            case _:
                raise TypeError(effect)

    def _snapshot(self, read: Callable[[], Any], incarnations: Any) -> Routine:
        snapshot = yield from fibers.blocking(read)
        for name, lease in snapshot.leases.items():
            member = snapshot.members.get(name)
            if member is not None:
                self.seen[name] = (member, lease)
        for name in {*(incarnations or ())} & self.seen.keys() - snapshot.leases.keys():
            self._seen_revoked(name)
        return snapshot

    def _publish_over(self, link: C10dCoordinatorLink, plan: Plan) -> Routine:
        self.cluster.checker.intends(encode(plan), plan, self.seen)
        self.store.draft = plan
        yield self.cluster.crash_point("before publishing", self.process)
        done = yield from fibers.blocking(lambda: link.publish(plan))
        yield self.cluster.crash_point("after publishing", self.process)
        return done

    def _remove(self, link: C10dCoordinatorLink) -> Routine:
        if not self.cluster.endpoint.may_remove:
            return False  # as if a node had registered meanwhile
        removed = yield from fibers.blocking(link.remove_run)
        if removed:
            self.store.removed()
        return removed


__all__ = ["Inbox", "KeyedCoordinator", "NodeLink", "in_virtual_time"]
