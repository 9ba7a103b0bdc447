"""Three machines that host the store together, as addresses of this one."""

from __future__ import annotations

import os
import signal

import pytest

from elastic_agent.linux import start_ticks
from elastic_agent.testing.processes import NodeProcess
from tests.cli.support import elastic_agent
from tests.etcd import need_etcd

from .cluster import EXPIRING_LEASE_S, Cluster
from .conftest import MakeCluster
from .leaks import secret_file
from .rules import see_it_end

NODES = {"a": ("127.0.0.1", 2), "b": ("127.0.0.2", 1), "c": ("127.0.0.3", 1)}
pytestmark = pytest.mark.system


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> Cluster:
    """Agents that find each other in an etcd of their own."""
    need_etcd()
    hosts = tuple(host for host, _ in NODES.values())
    return make_cluster("2:3", hosts=hosts, run_id=None, lease_s=EXPIRING_LEASE_S, alone=True)


def start(cluster: Cluster, node: str, *options: str) -> NodeProcess:
    host, slots = NODES[node]
    return cluster.start(node, slots, "--local-addr", host, *options, state=f"state-{node}")


def member_of(cluster: Cluster, node: str) -> int:
    """The process of etcd on this machine."""
    (file,) = cluster.folder.glob(f"state-{node}/members/*/pid")
    return int(file.read_text())


def roles_in_status(run_id: str) -> tuple[int, int]:
    """Return how many members lead, and how many follow."""
    (shown,) = [line for line in elastic_agent("status", run_id).stdout.splitlines() if "store: " in line]
    return shown.count("leads"), shown.count("follows")


def test_training_goes_on_without_any_of_three_machines(cluster: Cluster) -> None:
    """The killed machine joins again; an agent that was killed alone finds the member of etcd that it left.

    The death of a guard, after which all that it left is killed, leaves the member alone, too.
    """
    for node in NODES:
        start(cluster, node)
    first = cluster.wait_training(*NODES)
    run_id = cluster.steps()[0]["run_id"]
    assert roles_in_status(run_id) == (1, 2)

    cluster.agents["a"].kill_node()
    second = cluster.wait_training("b", "c", after=first)
    start(cluster, "a")
    third = cluster.wait_training(*NODES, after=second)

    member = member_of(cluster, "b")
    cluster.agents["b"].signal(signal.SIGKILL)
    fourth = cluster.wait_training("a", "c", after=third)
    start(cluster, "b")
    fifth = cluster.wait_training(*NODES, after=fourth)
    assert member_of(cluster, "b") == member

    member = member_of(cluster, "a")
    os.kill(cluster.agents["a"].guard, signal.SIGKILL)
    cluster.wait_training(*NODES, after=fifth)
    assert (member_of(cluster, "a"), start_ticks(member) is None) == (member, False)
    see_it_end(cluster, restarts=1)  # no member is left


def test_machines_with_a_secret_admit_none_with_another(cluster: Cluster) -> None:
    right, wrong = (("--secret-file", secret_file(cluster.folder, name)) for name in ("right", "wrong"))
    for node in NODES:
        start(cluster, node, *right)
    first = cluster.wait_training(*NODES)
    cluster.agents["c"].kill_node()
    second = cluster.wait_training("a", "b", after=first)
    start(cluster, "c", *wrong)
    cluster.wait_said("c", "certificates that were not made from this agent's secret")
    cluster.agents["c"].kill_node()
    start(cluster, "c", *right)
    cluster.wait_training(*NODES, after=second)
    assert roles_in_status(cluster.steps()[0]["run_id"]) == (1, 2)
    see_it_end(cluster, restarts=0)
