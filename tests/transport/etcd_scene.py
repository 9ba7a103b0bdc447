"""A run in a real etcd. A separate module, because a process that forks must not have imported gRPC before."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from elastic_agent.protocol.codec import encode
from elastic_agent.protocol.records import History, Plan
from elastic_agent.rendezvous.backends.etcd.backend import Members
from elastic_agent.rendezvous.backends.etcd.election_thread import LeaderKeyThread
from elastic_agent.transport import Secret
from elastic_agent.transport.base import ExchangeLink, UnreachableError
from elastic_agent.transport.etcd import (
    EtcdLink,
    EtcdReportLink,
    KeptLeases,
    Leadership,
    RunKeys,
    await_no_leader,
    campaign_for,
    dial_exchange,
    run_life,
)
from elastic_agent.transport.etcd.client import EtcdClient, delete, put
from elastic_agent.values import Endpoint, EtcdAccess
from tests.etcd import EtcdCluster

from .support import PATIENCE_S, Scene

LEASE_TTL_S = 60.0


def campaign(
    client: EtcdClient, keys: RunKeys, who: str, lease_ttl_s: float, patience_s: float
) -> Leadership | None:
    """Become the run's coordinator as soon as there is none; None if there still was one after a while."""
    life = await_no_leader(client, keys, patience_s)
    sent_s = time.monotonic()
    leadership = campaign_for(client, keys, who, lease_ttl_s, life) if life is not None else None
    if leadership is not None:
        LeaderKeyThread(leadership, sent_s).start()
    return leadership


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
        self.kept = KeptLeases(LEASE_TTL_S)
        self._terms: dict[str, Leadership] = {}
        self._open = ExitStack()

    def close(self) -> None:
        self._open.close()

    def keys(self, run_id: str = "run") -> RunKeys:
        return RunKeys(self.access.prefix, run_id)

    def client(self) -> EtcdClient:
        return self.dial()[0]

    def dial(self) -> tuple[EtcdClient, str]:
        """As agents do: again until a member answers, which may take a busy machine longer than one attempt lasts."""
        members = Members(endpoint_of(self.cluster), self.access, PATIENCE_S, self.secret)
        gives_up_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                client, store = members.dial()
            except UnreachableError:
                if time.monotonic() > gives_up_s:
                    raise
            else:
                self._open.callback(client.close)
                return client, store

    def node(self, run_id: str = "run") -> EtcdLink:
        client, store = self.dial()
        return EtcdLink(client, self.keys(run_id), store, self.kept, self.complaints.append)

    def leadership(
        self, run_id: str = "run", lease_ttl_s: float = LEASE_TTL_S, patience_s: float = 0.01
    ) -> Leadership:
        """The leadership of a new coordinator; there is no other leader."""
        run_life(self.client(), self.keys(run_id))  # a node has come
        leadership = campaign(self.client(), self.keys(run_id), "a test", lease_ttl_s, patience_s)
        assert leadership is not None, "another agent coordinates"
        self._open.callback(leadership.resign)
        return leadership

    def coordinator(self, run_id: str = "run") -> Leadership:
        """The first one's office, over another connection each time."""
        if run_id not in self._terms:
            self._terms[run_id] = self.leadership(run_id)
        return sharing_office(self._terms[run_id], self.client())

    def exchange(self) -> ExchangeLink:
        link = dial_exchange(endpoint_of(self.cluster), self.access, "tests", self.secret)
        self._open.callback(link.close)
        return link

    def reports(self, run_id: str = "run") -> EtcdReportLink:
        return EtcdReportLink(self.client(), self.keys(run_id), self.kept)

    def end_run(self) -> None:
        self.coordinator().remove_run(History(1))

    def hints(self, run_id: str = "run") -> Callable[[float], list[str]]:
        return self.coordinator(run_id).wait

    def stranger(self) -> EtcdStranger:
        return EtcdStranger(self.client())

    def root(self, run_id: str = "run") -> str:
        return self.keys(run_id).shown

    def forge(self, *plans: Plan) -> None:
        self.stranger().set(f"{self.root()}/plan", encode(plans[-1]))

    def lose_store(self) -> None:
        for server in self.cluster.members:
            server.kill()


class EtcdStranger:
    """A client that writes by hand."""

    def __init__(self, client: EtcdClient) -> None:
        self._client = client

    def set(self, key: str, value: bytes) -> None:
        self._client.transact([], [put(key.encode(), value)])

    def delete_key(self, key: str) -> None:
        self._client.transact([], [delete(key.encode())])

    def get(self, key: str) -> bytes:
        found = self._client.get(key.encode())
        assert found is not None, key
        return bytes(found.value)


def sharing_office(leadership: Leadership, client: EtcdClient) -> Leadership:
    """The same office over another connection."""
    own: Any = leadership
    return Leadership(client, own._keys, own._lease_id, own.ttl_s, own._since, own._who, own._life)


def endpoint_of(cluster: EtcdCluster) -> Endpoint:
    """Every member, as the settings would have them."""
    first, *others = (Endpoint("127.0.0.1", server.client_port) for server in cluster.members)
    return Endpoint(first.host, first.port, tuple(others))


@contextmanager
def etcd_scene(
    cluster: EtcdCluster, access: EtcdAccess | None = None, secret: Secret | None = None
) -> Iterator[EtcdScene]:
    """A scene, closed in the end."""
    scene = EtcdScene(cluster, access, secret)
    try:
        yield scene
    finally:
        scene.close()
