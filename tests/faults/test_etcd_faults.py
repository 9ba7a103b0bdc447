"""What happens to etcd itself, to the way there, and to the agent that coordinates."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from base64 import b64decode

import pytest

from elastic_agent.testing.processes import WAIT_TIMEOUT_S, NodeProcess, freeze, thaw
from tests.etcd import EtcdCluster

from .cluster import SHORT_LEASE_S, SHORT_MARGIN_S, Cluster
from .conftest import MakeCluster
from .rules import see_it_end

pytestmark = [pytest.mark.system, pytest.mark.prove]

ELECTION_S = 1.0
"""With leases as short as these the leader key outlives the coordinator's lease: for two seconds and half of one."""


@pytest.fixture
def etcd(three: EtcdCluster) -> str:
    """These agents meet there."""
    return three.endpoints


def wait_renewed(cluster: Cluster, etcd: EtcdCluster, *nodes: str) -> None:
    """Until every node has renewed its lease twice: it has found a member that answers."""
    before = leases(cluster, etcd)
    assert len(before) == len(nodes), before

    def look() -> bool | None:
        now = leases(cluster, etcd)
        return all(now.get(key, beat) >= beat + 2 for key, beat in before.items()) or None

    cluster.wait(f"renewals of {', '.join(nodes)}", look)


def leases(cluster: Cluster, etcd: EtcdCluster) -> dict[str, int]:
    """How often each lease in etcd was written."""
    found = json.loads(
        etcd.ctl("get", "--prefix", f"/tests/{cluster.mark}/1/r/{cluster.run_id}/", "--write-out=json")
    )
    return {one["key"]: one["version"] for one in found.get("kvs", []) if b"/l/" in b64decode(one["key"])}


def coordinating_pid(cluster: Cluster, etcd: EtcdCluster) -> str:
    """The process that coordinates, if any does."""
    holder = etcd.ctl(
        "get", f"/tests/{cluster.mark}/1/r/{cluster.run_id}/leader", "--print-value-only"
    ).strip()
    return holder.rpartition(":")[2]


def coordinator_of(cluster: Cluster, etcd: EtcdCluster) -> NodeProcess:
    """The agent that coordinates."""

    def look() -> NodeProcess | None:
        pid = coordinating_pid(cluster, etcd)
        return next((one for one in cluster.agents.values() if str(one.pid) == pid), None)

    return cluster.wait("an agent that coordinates", look)


def test_a_frozen_coordinator_is_replaced_without_a_restart_of_workers(
    make_cluster: MakeCluster, three: EtcdCluster
) -> None:
    cluster = make_cluster("2")
    command = [sys.executable, "-m", "tests.faults.lone_coordinator", three.endpoints]
    command += [
        f"/tests/{cluster.mark}",
        str(cluster.run_id),
        str(cluster.folder / "state-of-the-coordinator"),
    ]
    with (cluster.folder / "coordinator.log").open("wb") as log:
        lone = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        cluster.wait("the coordinator", lambda: coordinating_pid(cluster, three) == str(lone.pid) or None)
        cluster.start("a")
        cluster.start("b", 2)
        first = cluster.wait_training("a", "b")
        assert coordinating_pid(cluster, three) == str(lone.pid)

        freeze(lone.pid)
        successor = coordinator_of(cluster, three)
        wait_renewed(cluster, three, "a", "b")
        thaw(lone.pid)
        cluster.wait_steps(20)
        assert max(cluster.worlds()) == first, cluster.story()
        assert len(cluster.born()) == 3, "no worker was restarted"

        os.kill(cluster.pid_of("b/1"), signal.SIGKILL)
        second = cluster.wait_training("a", "b", after=first)
        assert second == first + 1
        assert coordinator_of(cluster, three) is successor
        see_it_end(cluster, restarts=1)
    finally:
        lone.kill()
        lone.wait()


def test_the_run_continues_after_the_coordinators_machine_dies(
    make_cluster: MakeCluster, three: EtcdCluster
) -> None:
    cluster = make_cluster("1:3")
    for node in ("a", "b", "c"):
        cluster.start_host(node)
    first = cluster.wait_training("a", "b", "c")
    lost = coordinator_of(cluster, three)
    lost_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    lost.kill_node()
    others = {"a", "b", "c"} - {lost.name}
    second = cluster.wait_training(*others, after=first)
    sealed_s = min(line["boottime_s"] for line in cluster.worlds()[second])
    assert sealed_s - lost_s < SHORT_LEASE_S + SHORT_MARGIN_S + ELECTION_S, (
        "no longer than for any other machine"
    )
    cluster.start(lost.name)
    third = cluster.wait_training("a", "b", "c", after=second)
    assert cluster.world(first) == cluster.world(third)
    assert third > second > first
    see_it_end(cluster, restarts=0)
    ended = f"/tests/{cluster.mark}/1/r/{cluster.run_id}/ended"
    kept = [key for key in three.keys(f"/tests/{cluster.mark}/1/r/") if "/report/" not in key]
    assert kept == [ended], "the rest of a finished run is removed, but for the reports, which expire"


def test_a_node_that_missed_the_end_of_its_run_joins_the_next_one(
    make_cluster: MakeCluster, three: EtcdCluster
) -> None:
    cluster = make_cluster("1:2")
    a, b = cluster.start_host("a"), cluster.start("b")
    first = cluster.wait_training("a", "b")
    b.freeze_node()
    last = cluster.wait_training("a", after=first)
    cluster.let_finish()
    assert a.process.wait(WAIT_TIMEOUT_S) == 0, cluster.story()
    (cluster.folder / "finish").unlink()

    cluster.start("a")
    begun = cluster.wait_training("a", after=last)
    assert begun == last + 1, "the next run goes above the generations of the one that ended"
    b.thaw()
    joined = cluster.wait_training("a", "b", after=begun)
    assert joined == begun + 1, cluster.story()
    see_it_end(cluster, restarts=0, paused={"b"})
