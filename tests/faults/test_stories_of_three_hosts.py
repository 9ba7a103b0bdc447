"""Three machines that host the store together, as addresses of this one."""

from __future__ import annotations

import signal

import pytest

from elastic_agent.testing.processes import NodeProcess
from tests.cli.support import elastic_agent
from tests.etcd import need_etcd

from .cluster import EXPIRING_LEASE_S, Cluster
from .conftest import MakeCluster
from .rules import see_it_end

NODES = {"a": ("127.0.0.1", 2), "b": ("127.0.0.2", 1), "c": ("127.0.0.3", 1)}
pytestmark = pytest.mark.system


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> Cluster:
    """Agents that find each other in an etcd of their own."""
    need_etcd()
    hosts = tuple(host for host, _ in NODES.values())
    return make_cluster("2:3", hosts=hosts, run_id=None, lease_s=EXPIRING_LEASE_S, alone=True)


def start(cluster: Cluster, node: str) -> NodeProcess:
    host, slots = NODES[node]
    return cluster.start(node, slots, "--local-addr", host, state=f"state-{node}")


def member_of(cluster: Cluster, node: str) -> int:
    """The process of etcd on this machine."""
    (file,) = cluster.folder.glob(f"state-{node}/members/*/pid")
    return int(file.read_text())


def test_training_goes_on_without_any_of_three_machines(cluster: Cluster) -> None:
    """The killed machine joins again; an agent that was killed alone finds the member of etcd that it left."""
    for node in NODES:
        start(cluster, node)
    first = cluster.wait_training(*NODES)
    run_id = cluster.steps()[0]["run_id"]
    (shown,) = [line for line in elastic_agent("status", run_id).stdout.splitlines() if "store: " in line]
    assert (shown.count("leads"), shown.count("follows")) == (1, 2)

    cluster.agents["a"].kill_node()
    second = cluster.wait_training("b", "c", after=first)
    start(cluster, "a")
    third = cluster.wait_training(*NODES, after=second)

    member = member_of(cluster, "b")
    cluster.agents["b"].signal(signal.SIGKILL)
    fourth = cluster.wait_training("a", "c", after=third)
    start(cluster, "b")
    cluster.wait_training(*NODES, after=fourth)
    assert member_of(cluster, "b") == member
    see_it_end(cluster, restarts=0)  # no member is left
