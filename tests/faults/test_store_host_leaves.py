"""Machines of their own: what users are told where the machine of the store has left, and where it is awaited."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.waiting import wait_for

from .cluster import Cluster
from .conftest import MakeCluster
from .machines import SUBNET, Machines, built

pytestmark = [pytest.mark.system, pytest.mark.prove]


@pytest.fixture
def machines() -> Iterator[Machines]:
    with built("a", "b") as found:
        yield found


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
    """What the command of a user says there."""
    words = [sys.executable, "-m", "elastic_agent", command, str(cluster.run_id)]
    state_dir = cluster.folder / f"state-{node}"
    asked = [*machines.within(node), *words, "--state-dir", str(state_dir)]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout
