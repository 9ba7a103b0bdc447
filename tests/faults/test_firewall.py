"""A firewall between two machines that lets the rendezvous through, and drops the connections of the workers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import pytest

from .conftest import MakeCluster
from .machines import SUBNET, Machines, built

pytestmark = [pytest.mark.system, pytest.mark.prove]


@pytest.fixture
def machines() -> Iterator[Machines]:
    with built("a", "b") as found:
        yield found


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
