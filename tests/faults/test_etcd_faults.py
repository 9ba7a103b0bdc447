"""What happens to etcd itself, to the way there, and to the agent that coordinates."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent.testing.node import NodeProcess, freeze, thaw
from elastic_agent.testing.processes import WAIT_TIMEOUT_S
from tests.etcd import EtcdCluster

from .cluster import SHORT_LEASE_S, SHORT_MARGIN_S, Cluster
from .conftest import MakeCluster
from .rules import see_it_end

pytestmark = [pytest.mark.system, pytest.mark.prove]

ELECTION_S = 1.0
"""With leases as short as these the leader key outlives the coordinator's lease: for two seconds and half of one."""


@pytest.fixture
def three(tmp_path: Path) -> Iterator[EtcdCluster]:
    """An etcd of three members, for this test alone."""
    with EtcdCluster(tmp_path, 3) as cluster:
        yield cluster


@pytest.fixture
def etcd(three: EtcdCluster) -> str:
    """These agents meet there."""
    return three.endpoints


def wait_steps(cluster: Cluster, count: int) -> None:
    """Until so many more steps were taken."""
    reached = cluster.steps()[-1]["step"]
    cluster.wait(f"{count} more steps", lambda: cluster.steps()[-1]["step"] >= reached + count or None)


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


def test_losing_one_etcd_member_of_three_has_no_effect(make_cluster: MakeCluster, three: EtcdCluster) -> None:
    cluster = make_cluster("2")
    cluster.start("a")
    cluster.start("b", 2)
    first = cluster.wait_training("a", "b")

    leader = three.leader()
    leader.kill()
    wait_renewed(cluster, three, "a", "b")
    os.kill(cluster.pid_of("b/1"), signal.SIGKILL)
    second = cluster.wait_training("a", "b", after=first)  # the agreement works on two members
    leader.start()
    three.wait_ready()

    follower = next(one for one in three.members if one is not three.leader())
    follower.kill()
    wait_renewed(cluster, three, "a", "b")
    follower.start()
    three.wait_ready()

    frozen = three.members[0]  # the one that all agents prefer
    frozen.freeze()
    wait_renewed(cluster, three, "a", "b")
    frozen.thaw()
    wait_renewed(cluster, three, "a", "b")

    assert max(cluster.worlds()) == second, cluster.story()
    assert not cluster.journal("lease_lost"), cluster.story()
    see_it_end(cluster, restarts=1)


def test_a_short_etcd_outage_is_logged_once_and_affects_no_worker(
    make_cluster: MakeCluster, three: EtcdCluster
) -> None:
    cluster = make_cluster("2", "--lease-ttl", "10")
    a, b = cluster.start("a"), cluster.start("b")
    first = cluster.wait_training("a", "b")
    for member in three.members:
        member.kill()
    for agent in (a, b):
        cluster.wait_said(agent.name, '"level": "warning"', "lost the connection to the store at")
    for member in three.members:
        member.start()
    three.wait_ready()
    for agent in (a, b):
        cluster.wait_said(agent.name, "answers again")
    wait_renewed(cluster, three, "a", "b")
    assert max(cluster.worlds()) == first, cluster.story()
    for agent in (a, b):
        assert len(agent.lines("lost the connection")) == 1, agent.said()
        assert len(agent.lines("answers again")) == 1, agent.said()
    see_it_end(cluster, restarts=0)


def test_a_long_etcd_outage_fences_all_nodes_which_then_rejoin(
    make_cluster: MakeCluster, three: EtcdCluster
) -> None:
    cluster = make_cluster("2")
    cluster.start("a")
    cluster.start("b")
    first = cluster.wait_training("a", "b")
    workers = [cluster.pid_of("a/0"), cluster.pid_of("b/0")]

    two = three.members[1:]  # without a majority
    for member in two:
        member.freeze()
    assert cluster.wait_gone(workers, 2 * SHORT_LEASE_S + 2.0) == [], cluster.story()
    for node in ("a", "b"):
        cluster.wait_event("lease_lost", node)
    for member in two:
        member.thaw()
    second = cluster.wait_training("a", "b", after=first)
    assert cluster.world(first) == cluster.world(second)
    see_it_end(cluster, restarts=0)


OUTAGE_S = 10.0
"""Five times the lease; after that, agents do nothing that they have not done before."""


def waited_s(agent: NodeProcess) -> float:
    """For how long the agent has waited for the store, as it last logged."""
    lines = agent.lines("waiting for the store", '"waited_s"')
    return max((float(json.loads(line)["waited_s"]) for line in lines), default=0.0)


def test_an_outage_of_etcd_far_beyond_the_lease_costs_one_generation_and_no_restart(
    make_cluster: MakeCluster, three: EtcdCluster
) -> None:
    cluster = make_cluster("2")
    a = cluster.start("a")
    cluster.start("b")
    first = cluster.wait_training("a", "b")
    for member in three.members:
        member.kill()
    cluster.wait("a to wait for etcd", lambda: waited_s(a) >= OUTAGE_S or None)
    for member in three.members:
        member.start()
    second = cluster.wait_training("a", "b", after=first)
    assert second == first + 1
    assert cluster.world(first) == cluster.world(second)
    assert a.process.poll() is None
    see_it_end(cluster, restarts=0)


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
        wait_steps(cluster, 20)
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


def test_a_run_whose_processes_were_all_killed_resumes_above_its_generation(
    make_cluster: MakeCluster, three: EtcdCluster
) -> None:
    cluster = make_cluster("2", "--max-restarts", "1")
    for node in ("a", "b"):
        cluster.start(node)
    first = cluster.wait_training("a", "b")
    cluster.order("a/0", "exit")
    second = cluster.wait_training("a", "b", after=first)
    for agent in cluster.agents.values():
        agent.kill_node()
    for member in three.members:
        member.kill()
    for member in three.members:
        member.start()
    for node in ("a", "b"):
        cluster.start(node)
    third = cluster.wait_training("a", "b", after=second)
    assert cluster.world(first) == cluster.world(third)
    see_it_end(cluster, restarts=1)


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
