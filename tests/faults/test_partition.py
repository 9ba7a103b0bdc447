"""Machines that cannot reach each other for a while: three network namespaces on a bridge."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .cluster import SHORT_LEASE_S, SHORT_MARGIN_S
from .conftest import MakeCluster
from .machines import SUBNET, Machines, built
from .rules import see_it_end

pytestmark = [pytest.mark.system, pytest.mark.prove]


NODES = ("a", "b", "c")


@pytest.fixture
def machines() -> Iterator[Machines]:
    with built(*NODES) as found:
        yield found


def test_partitioned_nodes_never_form_a_second_world(machines: Machines, make_cluster: MakeCluster) -> None:
    cluster = make_cluster("2:3", endpoint_host=f"{SUBNET}.1")
    for node in NODES:
        machines.start(cluster, node)
    first = cluster.wait_training(*NODES)

    # b alone: the others go on without it, after its guard has stopped its worker
    worker = cluster.pid_of("b/0")
    machines.cut_off("b")
    assert cluster.wait_gone([worker], SHORT_LEASE_S + SHORT_MARGIN_S) == []
    assert max(cluster.worlds()) == first, "the others went on before"
    second = cluster.wait_training("a", "c", after=first)
    cluster.wait_said("b", "eth0 of this machine has no link")
    machines.join("b")
    third = cluster.wait_training(*NODES, after=second)

    # the store's machine alone: it has too few nodes, the others have no store
    workers = [cluster.pid_of(f"{node}/0") for node in NODES]
    machines.cut_off("a")
    assert cluster.wait_gone(workers, 2 * SHORT_LEASE_S) == []
    cluster.wait_said("a", "waiting for 1 more node (at least 2 required)")
    assert max(cluster.worlds()) == third
    machines.join("a")
    fourth = cluster.wait_training(*NODES, after=third)
    assert cluster.world(first) == cluster.world(third) == cluster.world(fourth)
    see_it_end(cluster, restarts=0)


def test_the_run_survives_the_loss_and_return_of_the_stores_machine(
    machines: Machines, make_cluster: MakeCluster
) -> None:
    cluster = make_cluster("2:3", endpoint_host=f"{SUBNET}.1")
    for node in NODES:
        machines.start(cluster, node)
    first = cluster.wait_training(*NODES)
    cluster.agents["a"].kill_node()
    for node in ("b", "c"):
        cluster.wait_said(node, f"waiting for the store at {SUBNET}.1")
        cluster.wait_said(node, f"node a ({SUBNET}.1) hosts it", "start the same command")
    machines.start(cluster, "a")
    second = cluster.wait_training(*NODES, after=first)
    assert cluster.world(first) == cluster.world(second)
    see_it_end(cluster, restarts=0)
