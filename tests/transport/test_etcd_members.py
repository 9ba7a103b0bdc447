"""Several members: one that is dead, frozen or cut off from the others; none that leads; an etcd that is full."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.rendezvous.backends.etcd.backend import Members
from elastic_agent.transport.base import StoreLostError, TransportError, UnreachableError
from elastic_agent.transport.etcd.client import EtcdClient, put
from elastic_agent.values import Endpoint, EtcdAccess
from tests.etcd import EtcdCluster, EtcdServer
from tests.ports import free_ports

from .etcd_scene import EtcdScene, endpoint_of, etcd_scene
from .support import PATIENCE_S, lease, member, plan

ACCESS = EtcdAccess("/tests/members")
FROZEN_COSTS_S = 1.5
"""A second, and what a busy machine adds."""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """Three members; a test leaves them as it found them."""
    with EtcdCluster(tmp_path_factory.mktemp("three"), 3) as cluster:
        yield cluster


@contextlib.contextmanager
def frozen(*servers: EtcdServer) -> Iterator[None]:
    for server in servers:
        server.freeze()
    try:
        yield
    finally:
        for server in servers:
            server.thaw()


@contextlib.contextmanager
def dead(cluster: EtcdCluster, *servers: EtcdServer) -> Iterator[None]:
    for server in servers:
        server.kill()
    try:
        yield
    finally:
        for server in servers:
            server.start()
        for server in cluster.members:
            wait_for(server)


def wait_for(server: EtcdServer) -> None:
    """Until this member answers, for a majority."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return dial(Endpoint("127.0.0.1", server.client_port))
        except TransportError:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)


def dial(endpoint: Endpoint) -> None:
    client, _ = Members(endpoint, ACCESS).dial()
    client.close()


def beginning_with(cluster: EtcdCluster, *first: EtcdServer) -> Endpoint:
    """All members, these first."""
    ordered = [*first, *(one for one in cluster.members if one not in first)]
    head, *others = (Endpoint("127.0.0.1", one.client_port) for one in ordered)
    return Endpoint(head.host, head.port, tuple(others))


def followers(cluster: EtcdCluster) -> list[EtcdServer]:
    leader = cluster.leader()
    return [one for one in cluster.members if one is not leader]


# -- another member will do -----------------------------------------------------------------------


def test_a_dead_member_is_skipped_quickly_and_not_tried_again(three: EtcdCluster) -> None:
    gone = followers(three)[0]
    members = Members(beginning_with(three, gone), ACCESS)
    with dead(three, gone):
        began_s = time.monotonic()
        clients = [members.dial()[0] for _ in range(3)]
        assert time.monotonic() - began_s < FROZEN_COSTS_S
        assert len({client.endpoint for client in clients}) == 1, "all of this process use the same one"
        assert clients[0].endpoint.port != gone.client_port
    for client in clients:
        client.close()


def test_a_frozen_member_costs_one_second_once(three: EtcdCluster) -> None:
    still = followers(three)[0]
    members = Members(beginning_with(three, still), ACCESS)
    with frozen(still):
        began_s = time.monotonic()
        first, _ = members.dial()
        dialled_s = time.monotonic()
        assert dialled_s - began_s < FROZEN_COSTS_S
        second, _ = members.dial()
        assert time.monotonic() - dialled_s < FROZEN_COSTS_S / 2
    first.close()
    second.close()


def test_the_loss_of_etcds_leader_is_tolerated(three: EtcdCluster) -> None:
    leader = three.leader()
    with etcd_scene(three) as scene:
        node = scene.joined("a")
        scene.coordinator().publish(plan(1))
        with dead(three, leader):
            again = dial_until_answered(scene)
            assert again.store_id == node.store_id
            assert again.read_plan() == plan(1)
            assert again.renew(lease("a"), lease("a").renewed())


def dial_until_answered(scene: EtcdScene) -> Any:
    """As a session does; the others take a moment to elect a new leader."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return scene.node()
        except UnreachableError:
            assert time.monotonic() < deadline_s


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_members_are_named_by_any_kind_of_address(tmp_path: Path, host: str) -> None:
    (closed,) = free_ports(1)
    plain = host.strip("[]")
    with EtcdCluster(tmp_path, hosts=("127.0.0.1", "[::1]")) as cluster:
        port = cluster.members[0].client_port
        endpoint = Endpoint(plain, closed, (Endpoint(plain, port),))
        assert str(endpoint) == f"{host}:{closed},{host}:{port}"
        client, _ = Members(endpoint, ACCESS).dial()
        assert client.endpoint == Endpoint(plain, port)
        assert client.local_address in ("127.0.0.1", "::1")
        client.close()


# -- no majority ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_without_a_majority_writes_fail_with_the_reason(three: EtcdCluster, how: str) -> None:
    left, *lost = three.members
    alone = Endpoint("127.0.0.1", left.client_port)
    with etcd_scene(three) as scene:
        node, _ = EtcdClient.dial(alone, scene.access), scene.joined("a")
        with dead(three, *lost) if how == "killed" else frozen(*lost):
            began_s = time.monotonic()
            with pytest.raises(StoreLostError, match=r"no majority|no leader"):
                node.transact([], [put(b"/tests/members/x", b"y")])
            assert time.monotonic() - began_s < FROZEN_COSTS_S
            with pytest.raises(UnreachableError, match=r"no majority|no leader") as caught:
                dial(endpoint_of(three))
            text = str(caught.value)
            assert text.isprintable()
            for server in lost:
                assert f"127.0.0.1:{server.client_port}" in text, "what is wrong with each"
        node.close()
    for server in three.members:
        wait_for(server)


# -- no space -------------------------------------------------------------------------------------


def test_a_full_etcd_is_reported_and_can_be_read(tmp_path: Path) -> None:
    with (
        EtcdCluster(tmp_path, options=["--quota-backend-bytes", "100000"]) as cluster,
        etcd_scene(cluster) as scene,
    ):
        node, leadership = scene.joined("a"), scene.coordinator()
        assert leadership.publish(plan(1))
        fill(scene)
        for write in (
            lambda: node.renew(lease("a"), lease("a").renewed()),
            lambda: node.write(member("a", slots=3)),
            lambda: leadership.publish(plan(2)),
        ):
            with pytest.raises(
                StoreLostError, match=r"is full .NOSPACE alarm.: compact and defragment"
            ) as caught:
                write()
            assert str(caught.value).isprintable()
        assert scene.node().next_plan(0, PATIENCE_S) == plan(1)


def fill(scene: EtcdScene) -> None:
    client = scene.client()
    with contextlib.suppress(StoreLostError):
        for number in itertools.count():
            client.transact([], [put(f"/tests/filling/{number}".encode(), b"x" * 20_000)])
