"""Machines, as network namespaces on a bridge, that cannot reach each other, or whose store has left."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys

import pytest

from tests.waiting import wait_for

from .cluster import SHORT_LEASE_S, SHORT_MARGIN_S, Cluster
from .conftest import MakeCluster
from .machines import SUBNET, Machines
from .rules import see_it_end

NODES = ("a", "b", "c")
pytestmark = [pytest.mark.system, pytest.mark.prove]


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


def drop_connections_to_ports(machines: Machines, node: str, ports: str) -> None:
    if shutil.which("nft") is None:
        pytest.skip("a firewall needs the nft command (Debian: nftables)")
    rules = (
        "add table inet f; add chain inet f in { type filter hook input priority 0; }; "
        f"add rule inet f in iifname eth0 tcp dport {ports} tcp flags & (syn | ack) == syn drop"
    )
    subprocess.run([*machines.within(node), "nft", rules], check=True, capture_output=True, text=True)


def test_workers_that_a_firewall_separates_are_named_within_seconds(
    machines: Machines, make_cluster: MakeCluster
) -> None:
    """The store and the bootstrap stores have ports below; gloo listens on ports that the system chooses."""
    cluster = make_cluster("2", "--port-range", "20000:20100", endpoint_host=f"{SUBNET}.1")
    for node in ("a", "b"):
        drop_connections_to_ports(machines, node, "32768-60999")
        machines.start(cluster, node)
    words = "worker b/0 has tried for", f"to connect to a ({machines.address('a')}), port "
    for node in (
        "b",
        "a",
    ):  # gloo has the higher rank connect to the lower one: a can only read what b reports
        line = cluster.wait_said(node, *words)
        assert (
            "probably a firewall drops the packets; allow TCP connections between the nodes on all ports"
            in line
        )


def test_an_interrupted_host_is_said_to_serve_the_store_and_its_end_to_be_awaited(
    machines: Machines, make_cluster: MakeCluster
) -> None:
    cluster = make_cluster("1:2", endpoint_host=f"{SUBNET}.1")
    for node in ("a", "b"):
        machines.start(cluster, node)
    both = cluster.wait_training("a", "b")
    host = cluster.agents.pop("a")
    host.process.send_signal(signal.SIGINT)
    cluster.wait_training("b", after=both)
    for command in ("status", "why"):
        assert "and its agent stayed to serve the store to b: keep it" in said(
            machines, cluster, "a", command
        )
    host.process.send_signal(signal.SIGINT)
    host.process.wait(30)
    wait_for(
        "the outage to be told", lambda: "has not answered since" in said(machines, cluster, "b", "status")
    )
    for command in ("status", "why"):
        remedy = f"on {SUBNET}.1 again: the run continues when the store answers"
        assert remedy in said(machines, cluster, "b", command)
        assert "if it has ended while the run goes on, start the same command there again" in said(
            machines, cluster, "a", command
        )


def said(machines: Machines, cluster: Cluster, node: str, command: str) -> str:
    """Return what the command of a user says there."""
    words = [sys.executable, "-m", "elastic_agent", command, str(cluster.run_id)]
    state_dir = cluster.folder / f"state-{node}"
    asked = [*machines.within(node), *words, "--state-dir", str(state_dir)]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout
