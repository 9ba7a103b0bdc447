"""Several members: one that is dead, frozen or cut off from the others; none that leads; an etcd that is full."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from elastic_agent.rendezvous.backends.etcd.backend import Members
from elastic_agent.transport.base import StoreLostError, TransportError, UnreachableError
from elastic_agent.transport.etcd.api import put
from elastic_agent.transport.etcd.client import CALL_TIMEOUT_S, EtcdClient
from elastic_agent.values import Endpoint, EtcdAccess
from tests.etcd import EtcdCluster, EtcdServer
from tests.loop_thread import Blocking, in_loop
from tests.waiting import wait_for

from .etcd_scene import EtcdScene, endpoint_of, etcd_scene
from .support import PATIENCE_S, lease, member, plan

T = TypeVar("T")

ACCESS = EtcdAccess("/tests/members")


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
        wait_for_members(cluster)


def wait_for_members(cluster: EtcdCluster) -> None:
    """Wait until each member answers, for a majority."""
    for server in cluster.members:
        first_answer(partial(dial, Endpoint("127.0.0.1", server.client_port)))


def dial(endpoint: Endpoint) -> None:
    client = in_loop(Members(endpoint, ACCESS).dial())
    Blocking(client).close()


def first_answer(ask: Callable[[], T]) -> T:
    """Ask again until etcd answers: its members may be electing a leader, also because the machine was busy."""
    answers: list[T] = []

    def has_answered() -> bool:
        with contextlib.suppress(TransportError):
            answers.append(ask())
        return bool(answers)

    wait_for("an answer of etcd", has_answered)
    return answers[0]


def beginning_with(cluster: EtcdCluster, *first: EtcdServer) -> Endpoint:
    """Return the endpoint of all members, these first."""
    ordered = [*first, *(server for server in cluster.members if server not in first)]
    head, *others = (Endpoint("127.0.0.1", server.client_port) for server in ordered)
    return Endpoint(head.host, head.port, tuple(others))


def followers(cluster: EtcdCluster) -> list[EtcdServer]:
    leader = cluster.leader()
    return [server for server in cluster.members if server is not leader]


# -- another member will do -----------------------------------------------------------------------


def test_a_dead_member_is_skipped(three: EtcdCluster) -> None:
    gone = followers(three)[0]
    members = Members(beginning_with(three, gone), ACCESS, PATIENCE_S)
    with dead(three, gone):
        clients = [first_answer(Blocking(members).dial) for _ in range(3)]
        assert len({client.endpoint for client in clients}) == 1, "all of this process use the same one"
        assert clients[0].endpoint.port != gone.client_port
    for client in clients:
        Blocking(client).close()


def test_a_frozen_member_is_given_up_for_another_one(three: EtcdCluster) -> None:
    still = followers(three)[0]
    members = Members(beginning_with(three, still), ACCESS)
    with frozen(still):
        for _ in range(2):
            client = first_answer(Blocking(members).dial)
            assert client.endpoint.port != still.client_port
            Blocking(client).close()


# -- no majority ----------------------------------------------------------------------------------

NO_MAJORITY = r"no majority|no leader"


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_without_a_majority_writes_fail_with_the_reason(three: EtcdCluster, how: str) -> None:
    left, *lost = three.members
    client: Any = in_loop(EtcdClient.dial(Endpoint("127.0.0.1", left.client_port), ACCESS, PATIENCE_S))
    client.timeout_s = CALL_TIMEOUT_S
    with dead(three, *lost) if how == "killed" else frozen(*lost):
        with pytest.raises(StoreLostError, match=NO_MAJORITY):
            in_loop(client.transact([], [put(b"/tests/members/x", b"y")]))

        def why_not() -> str:
            with pytest.raises(UnreachableError) as caught:
                dial(endpoint_of(three))
            return str(caught.value) if re.search(NO_MAJORITY, str(caught.value)) else ""

        # On a busy machine, the last member may not answer in time either.
        text = wait_for("the reason", why_not)
        assert text.isprintable()
        for server in lost:
            assert f"127.0.0.1:{server.client_port}" in text, "what is wrong with each"
    Blocking(client).close()
    wait_for_members(three)


# -- no space -------------------------------------------------------------------------------------


def test_a_full_etcd_is_reported_and_can_be_read(tmp_path: Path) -> None:
    with (
        EtcdCluster(tmp_path, options=["--quota-backend-bytes", "100000"]) as cluster,
        etcd_scene(cluster) as scene,
    ):
        node, leadership = scene.joined("a"), scene.coordinator()
        leadership.publish(plan(1))
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
