"""Machines that cannot reach each other for a while: three network namespaces on a bridge."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from .cluster import LEASE_S, MARGIN_S, AgentProcess, Cluster
from .conftest import MakeCluster
from .rules import see_it_end

pytestmark = [pytest.mark.faults, pytest.mark.netns, pytest.mark.timeout(300)]


@pytest.fixture
def etcd() -> None:
    """These are about the c10d store."""


NODES = ("a", "b", "c")
SUBNET = "10.213.77"


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)


class Machines:
    """One network namespace for each node, joined by a bridge in one more; cables can be pulled."""

    def __init__(self) -> None:
        self._tag = f"ea{os.getpid()}"

    def build(self) -> None:
        ip(f"netns add {self._tag}-net")
        ip(f"-n {self._tag}-net link add br0 type bridge")
        ip(f"-n {self._tag}-net link set br0 up")
        for number, node in enumerate(NODES, 1):
            ip(f"netns add {self._tag}-{node}")
            ip(f"-n {self._tag}-net link add port-{node} type veth peer name eth0 netns {self._tag}-{node}")
            ip(f"-n {self._tag}-net link set port-{node} master br0 up")
            ip(f"-n {self._tag}-{node} link set lo up")
            ip(f"-n {self._tag}-{node} addr add {SUBNET}.{number}/24 dev eth0")
            ip(f"-n {self._tag}-{node} link set eth0 up")

    def remove(self) -> None:
        """Removing a namespace removes its ends of the cables, and with one end the other."""
        for name in (*NODES, "net"):
            subprocess.run(["ip", "netns", "del", f"{self._tag}-{name}"], capture_output=True, check=False)

    def start(self, cluster: Cluster, node: str) -> AgentProcess:
        return cluster.start(
            node,
            state=f"state-{node}",
            within=("ip", "netns", "exec", f"{self._tag}-{node}"),
            GLOO_SOCKET_IFNAME="eth0",
        )

    def cut_off(self, node: str) -> None:
        ip(f"-n {self._tag}-net link set port-{node} down")

    def join(self, node: str) -> None:
        ip(f"-n {self._tag}-net link set port-{node} up")


@pytest.fixture
def machines() -> Iterator[Machines]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the ip command (Debian: iproute2)")
    built = Machines()
    try:
        built.build()
    except subprocess.CalledProcessError as error:
        built.remove()
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    yield built
    built.remove()


def test_nodes_cut_off_and_joined_again_never_make_two_worlds(
    machines: Machines, make_cluster: MakeCluster
) -> None:
    cluster = make_cluster("2:3", endpoint_host=f"{SUBNET}.1")
    for node in NODES:
        machines.start(cluster, node)
    first = cluster.wait_training(*NODES)

    # b alone: the others go on without it, after its guard has stopped its worker
    worker = cluster.pid_of("b/0")
    machines.cut_off("b")
    assert cluster.wait_gone([worker], LEASE_S + MARGIN_S) == []
    assert max(cluster.worlds()) == first, "the others went on before"
    second = cluster.wait_training("a", "c", after=first)
    machines.join("b")
    third = cluster.wait_training(*NODES, after=second)

    # the store's machine alone: it has too few nodes, the others have no store
    workers = [cluster.pid_of(f"{node}/0") for node in NODES]
    machines.cut_off("a")
    assert cluster.wait_gone(workers, 2 * LEASE_S) == []
    cluster.wait_said("a", "waiting for 1 more of at least 2 nodes")
    assert max(cluster.worlds()) == third
    machines.join("a")
    fourth = cluster.wait_training(*NODES, after=third)
    assert cluster.world(first) == cluster.world(third) == cluster.world(fourth)
    see_it_end(cluster, restarts=0)


def test_the_stores_machine_dies_and_comes_back(machines: Machines, make_cluster: MakeCluster) -> None:
    cluster = make_cluster("2:3", endpoint_host=f"{SUBNET}.1")
    for node in NODES:
        machines.start(cluster, node)
    first = cluster.wait_training(*NODES)
    cluster.agents["a"].kill_node()
    for node in ("b", "c"):
        cluster.wait_said(node, f"waiting for the store at {SUBNET}.1")
    machines.start(cluster, "a")
    second = cluster.wait_training(*NODES, after=first)
    assert cluster.world(first) == cluster.world(second)
    see_it_end(cluster, restarts=0)
