"""The store is served on a machine that does not train, as `elastic-agent serve` does it."""

from __future__ import annotations

import signal

import pytest

from elastic_agent.testing.processes import NodeProcess

from .cluster import Cluster
from .conftest import MakeCluster
from .machines import SUBNET, Machines
from .rules import see_it_end

pytestmark = [pytest.mark.system, pytest.mark.prove]

HEAD = f"{SUBNET}.4"
LONG_LEASE = ("--lease-ttl", "30")


def serve(cluster: Cluster, machines: Machines) -> NodeProcess:
    return cluster.serve("head", within=machines.within("head"))


def connections(cluster: Cluster) -> int:
    return len(cluster.journal("connected"))


def wait_for_steps(cluster: Cluster, reconnected: int) -> None:
    """Until both nodes found the new store, and took three more steps."""
    cluster.wait("both to be back", lambda: connections(cluster) >= reconnected)
    cluster.wait_steps(3)


def test_workers_continue_while_the_server_is_killed_or_upgraded(
    machines: Machines, make_cluster: MakeCluster
) -> None:
    cluster = make_cluster("2", *LONG_LEASE, endpoint_host=HEAD)
    server = serve(cluster, machines)
    for node in ("a", "b"):
        machines.start(cluster, node)
    generation = cluster.wait_training("a", "b")
    workers = {worker["pid"] for worker in cluster.born()}
    cluster.wait_said("head", "run started")
    reconnected = connections(cluster)

    server.signal(signal.SIGKILL)
    assert server.process.wait(10) == -signal.SIGKILL
    server = serve(cluster, machines)
    reconnected += 2
    wait_for_steps(cluster, reconnected)
    cluster.wait_said("head", "run resumed", "continues without a restart")

    server.signal(signal.SIGTERM)
    assert server.process.wait(10) == 0
    assert server.lines("SIGTERM received", f"still used by 1 run ({cluster.run_id})")
    serve(cluster, machines)
    wait_for_steps(cluster, reconnected + 2)
    cluster.wait_said("head", "run resumed", "continues without a restart")

    assert {worker["pid"] for worker in cluster.born()} == workers, "no worker was touched"
    assert {*cluster.worlds()} == {generation}
    assert not cluster.journal("lease_lost")
    see_it_end(cluster, restarts=0)
    cluster.wait_said("head", "run finished")
