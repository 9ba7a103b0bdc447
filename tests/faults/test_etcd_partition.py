"""A machine that still reaches the others, but not etcd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd import EtcdCluster

from .cluster import SHORT_LEASE_S, SHORT_MARGIN_S
from .conftest import MakeCluster
from .machines import Machines
from .rules import see_it_end

NODES = ("a", "b", "c")
pytestmark = [pytest.mark.system, pytest.mark.prove]


@pytest.fixture
def etcd(machines: Machines, tmp_path: Path) -> Iterator[str]:
    """The endpoint of an etcd on a machine of its own."""
    address = machines.address("head")
    with EtcdCluster(tmp_path, hosts=("127.0.0.1", address), within=machines.within("head")) as cluster:
        yield f"{address}:{cluster.members[0].client_port}"


def test_a_node_partitioned_from_etcd_is_excluded_and_the_others_continue(
    machines: Machines, make_cluster: MakeCluster
) -> None:
    cluster = make_cluster("2:3", etcd_is_new=True)
    for node in NODES:
        machines.start(cluster, node)
    first = cluster.wait_training(*NODES)

    worker = cluster.pid_of("b/0")
    machines.hide("head", "b")
    assert cluster.wait_gone([worker], SHORT_LEASE_S + SHORT_MARGIN_S) == []
    assert max(cluster.worlds()) == first, "the others went on before"
    second = cluster.wait_training("a", "c", after=first)
    cluster.wait_said("b", "waiting for the store", "no answer")

    machines.show("head", "b")
    third = cluster.wait_training(*NODES, after=second)
    assert cluster.world(first) == cluster.world(third)
    see_it_end(cluster, restarts=0)
