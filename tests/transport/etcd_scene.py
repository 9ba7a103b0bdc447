"""A run in a real etcd. A separate module, because a process that forks must not have imported gRPC before."""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, aclosing, contextmanager
from typing import Any, TypeVar

import pytest

from elastic_agent.rendezvous.backends.etcd.backend import Members
from elastic_agent.rendezvous.backends.etcd.election import keep_leading
from elastic_agent.rendezvous.waits import Signal
from elastic_agent.transport import CoordinatorRecords, LifeKeys, ReportRecords, RunKeys, Secret
from elastic_agent.transport.base import TransportError, UnreachableError
from elastic_agent.transport.etcd import (
    EtcdTable,
    KeptLease,
    Leadership,
    await_no_leader,
    campaign_for,
    root_of,
)
from elastic_agent.transport.etcd.api import delete, put
from elastic_agent.transport.etcd.client import EtcdClient, News
from elastic_agent.values import Endpoint, EtcdAccess
from tests.etcd import EtcdCluster
from tests.loop_thread import Blocking, background_loop, in_loop

from .support import PATIENCE_S, Scene, life_keys

T = TypeVar("T")

LEASE_TTL_S = 60.0


def begin(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Begin what takes a while."""
    return asyncio.run_coroutine_threadsafe(work, background_loop())


class Term(Blocking):
    """The records of a run under a coordinator's leadership, whose own methods are at hand, too."""

    def __init__(self, leadership: Leadership, keeper: asyncio.Task[str] | None = None) -> None:
        super().__init__(leadership.records)
        self.leadership = leadership
        self.keeper = keeper
        """Keeps the leader key alive, unless another one does."""

    def __getattr__(self, name: str) -> Any:
        if hasattr(Leadership, name):
            return getattr(Blocking(self.leadership), name)
        return super().__getattr__(name)


async def campaign(
    client: EtcdClient, root: str, who: str, lease_ttl_s: float, patience_s: float, run_id: str = "run"
) -> Term | None:
    """Become the run's coordinator as soon as there is none; None if there still was one after a while."""
    run = RunKeys(run_id)
    life = await await_no_leader(client, root, run, patience_s)
    sent_s = time.monotonic()
    if life is None:
        return None
    elected = await campaign_for(client, root, LifeKeys(run, life), who, lease_ttl_s)
    if elected is None:
        return None
    return Term(elected, asyncio.create_task(keep_leading(elected, Signal(), time.monotonic, sent_s)))


class EtcdScene(Scene):
    """One etcd, with a prefix of its own."""

    def __init__(
        self, cluster: EtcdCluster, access: EtcdAccess | None = None, secret: Secret | None = None
    ) -> None:
        """``secret``: connect with certificates made from it."""
        self.cluster = cluster
        self.secret = secret
        self.access = access or EtcdAccess(f"/tests/{secrets.token_hex(4)}")
        self.complaints: list[str] = []
        self.prefix = root_of(self.access.prefix)
        """Of all keys of elastic-agent."""
        self.kept = KeptLease.of_node(LEASE_TTL_S)
        self.stop_signal = signal.SIGKILL
        """With which the store is lost."""
        self._terms: dict[str, Term] = {}
        self._open = ExitStack()

    def close(self) -> None:
        self._open.close()

    def lease_id(self) -> int:
        """Return the id of the etcd lease of new records of nodes."""
        return in_loop(self.kept.id(self.dial()))

    def key(self, key: str) -> bytes:
        """Return a key of a table as etcd has it."""
        return f"{self.prefix}{key}".encode()

    def life_keys(self, run_id: str = "run") -> LifeKeys:
        """Return the keys of the present life of a run, which begins now if there is none."""
        return life_keys(self.table(), run_id)

    def client(self) -> Any:
        return Blocking(self.dial())

    def dial(self) -> EtcdClient:
        """Dial as agents do: until a member answers, which may take a busy machine longer than one attempt lasts."""
        members = Members(endpoint_of(self.cluster), self.access, PATIENCE_S, self.secret)
        gives_up_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                client = in_loop(members.dial())
            except UnreachableError:
                if time.monotonic() > gives_up_s:
                    raise
            else:
                self._open.callback(Blocking(client).close)
                return client

    def table(self) -> EtcdTable:
        return EtcdTable(self.dial(), self.prefix, lease=self.kept)

    def leadership(
        self, run_id: str = "run", lease_ttl_s: float = LEASE_TTL_S, patience_s: float = 0.01
    ) -> Term:
        """Return the leadership of a new coordinator; there is no other leader."""
        self.life_keys(run_id)  # a node has come
        term = in_loop(campaign(self.dial(), self.prefix, "a test", lease_ttl_s, patience_s, run_id))
        assert term is not None, "another agent coordinates"
        self._open.callback(term.resign)
        return term

    def coordinator(self, run_id: str = "run") -> Term:
        """Return the leadership of the first call, over another connection each time."""
        if run_id not in self._terms:
            self._terms[run_id] = self.leadership(run_id)
        term = sharing_office(self._terms[run_id], self.dial())
        own: Any = term.leadership
        term.records = own.records = CoordinatorRecords(own._table, own.keys, self.complaints.append)
        return term

    def beside(self) -> Any:
        table = Blocking(EtcdTable(self.dial(), f"{self.access.prefix}/tests/", lease=self.kept))
        self._open.callback(table.close)
        return table

    def reports(self, run_id: str = "run") -> Any:
        return Blocking(ReportRecords(self.table(), run_id))

    def hints(self, run_id: str = "run") -> Callable[[float], list[str]]:
        term = self.coordinator(run_id)
        return lambda timeout_s: list(term.wait(timeout_s))

    def stranger(self) -> EtcdStranger:
        return EtcdStranger(self.client())

    def lose_store(self) -> None:
        for server in self.cluster.members:
            assert server.process is not None
            server.process.send_signal(self.stop_signal)


class EtcdStranger:
    """A client that writes by hand."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, value: bytes) -> None:
        self._client.transact([], [put(key.encode(), value)])

    def delete_key(self, key: str) -> None:
        self._client.transact([], [delete(key.encode())])

    def get(self, key: str) -> bytes:
        found = self._client.get(key.encode())
        assert found is not None, key
        return bytes(found.value)


async def first_change(client: EtcdClient, key: bytes, revision: int) -> News:
    """Return the first change of a key since a revision."""
    async with aclosing(client.follow(key, None, revision)) as changes:
        return await anext(changes)


def client_of(records: Any) -> Any:
    """Return the client below records."""
    return records.records.table.client


def sharing_office(term: Term, client: EtcdClient) -> Term:
    """Return the same leadership over another connection."""
    own: Any = term.leadership
    return Term(Leadership(client, own.root, own.keys, own.lease_id, own.ttl_s, own.since, own.who))


def endpoint_of(cluster: EtcdCluster) -> Endpoint:
    """Return the endpoint of all members, as in the settings."""
    first, *others = (Endpoint("127.0.0.1", server.client_port) for server in cluster.members)
    return Endpoint(first.host, first.port, tuple(others))


def answer(
    endpoint: Endpoint, access: EtcdAccess, secret: Secret | None = None, timeout_s: float = PATIENCE_S
) -> tuple[type[Exception], str]:
    """Return the error with which the dialling ends."""
    with pytest.raises(TransportError) as caught:
        in_loop(Members(endpoint, access, timeout_s, secret).dial())
    text = str(caught.value)
    assert text.isprintable(), "one line"
    assert len(text) < 400
    return type(caught.value), text


def add_user(cluster: EtcdCluster, name: str, password: str, *permissions: tuple[str, str]) -> None:
    """Add a user with (what, key prefix) permissions."""
    cluster.ctl("user", "add", name, "--new-user-password", password)
    cluster.ctl("role", "add", name)
    cluster.ctl("user", "grant-role", name, name)
    for what, where in permissions:
        cluster.ctl("role", "grant-permission", name, "--prefix=true", what, where)


@contextmanager
def etcd_scene(
    cluster: EtcdCluster, access: EtcdAccess | None = None, secret: Secret | None = None
) -> Iterator[EtcdScene]:
    """Yield a scene, and close it."""
    scene = EtcdScene(cluster, access, secret)
    try:
        yield scene
    finally:
        scene.close()
