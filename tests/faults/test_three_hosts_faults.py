"""Three machines that host the store together: each may be lost, and none has to be repaired for the others."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from tests.etcd import need_etcd

from .cluster import Cluster
from .conftest import MakeCluster
from .machines import Machines
from .rules import check_safety, see_it_end

NODES = ("a", "b", "c")
LEASE_S, MARGIN_S = 5.0, 0.5
AT_MOST_S = LEASE_S + MARGIN_S + 1.0
pytestmark = [pytest.mark.system, pytest.mark.prove]

Fault = tuple[Callable[[Cluster, Machines, str], object], Callable[[Cluster, Machines, str], object]]


def start(cluster: Cluster, machines: Machines, node: str) -> None:
    """The agent of a machine; the first one has two workers."""
    machines.start(cluster, node, slots=2 if node == "a" else 1)


FAULTS: dict[str, Fault] = {
    "SIGKILL": (lambda cluster, _, node: cluster.agents[node].kill_node(), start),
    "SIGSTOP": (
        lambda cluster, _, node: cluster.agents[node].freeze_node(),
        lambda cluster, _, node: cluster.agents[node].thaw(),
    ),
    "no network": (
        lambda _, machines, node: machines.cut_off(node),
        lambda _, machines, node: machines.join(node),
    ),
}


@pytest.fixture
def cluster(machines: Machines, make_cluster: MakeCluster) -> Cluster:
    """Three agents that train, on machines that host the store."""
    need_etcd()
    hosts = tuple(map(machines.address, NODES))
    cluster = make_cluster("2:3", hosts=hosts, run_id=None, lease_s=LEASE_S, margin_s=MARGIN_S)
    for node in NODES:
        start(cluster, machines, node)
    cluster.wait_training(*NODES)
    return cluster


def wait_members(cluster: Cluster, machines: Machines) -> str:
    """Until all members of etcd follow the same leader; its machine."""
    endpoints = ",".join(f"{machines.address(node)}:{cluster.port}" for node in NODES)
    command = [
        *machines.within("a"),
        "etcdctl",
        f"--endpoints={endpoints}",
        "endpoint",
        "status",
        "-w",
        "json",
    ]

    def look() -> str | None:
        answer = subprocess.run(
            command, env={"PATH": os.environ["PATH"], "ETCDCTL_API": "3"}, capture_output=True, check=False
        )
        views = json.loads(answer.stdout) if answer.returncode == 0 else []
        leaders = {view["Status"].get("leader", 0) for view in views}
        ids = [view["Status"]["header"]["member_id"] for view in views]
        return NODES[ids.index(leaders.pop())] if len(views) == 3 and len(leaders) == 1 else None

    return cluster.wait("three members of etcd", look)


@pytest.mark.parametrize("fault", FAULTS)
def test_no_machine_is_needed(cluster: Cluster, machines: Machines, fault: str) -> None:
    """One after the other, and so the leader's and the coordinator's, too; nothing is configured in between."""
    strike, undo = FAULTS[fault]
    paused = NODES if fault == "SIGSTOP" else ()
    took_s, late = {}, {}
    for node in NODES:
        leader = wait_members(cluster, machines)
        newest = max(cluster.worlds())
        struck_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        strike(cluster, machines, node)
        second = cluster.wait_training(*(other for other in NODES if other != node), after=newest)
        on_s = next(step["boottime_s"] for step in cluster.steps() if step["generation"] == second)
        took_s[f"{node}, leader {leader}"] = on_s - struck_s
        # A new leader of etcd begins all leases anew, the coordinator's, too.
        if on_s - struck_s > AT_MOST_S + (LEASE_S if leader == node else 0.0):
            late[node] = on_s - struck_s
        undo(cluster, machines, node)
        cluster.wait_training(*NODES, after=second)
    print(f"{fault}: {took_s}")
    assert not late, f"{took_s}\n{cluster.story()}"
    see_it_end(cluster, restarts=0, paused=paused)


def test_all_three_killed_at_once_resume_at_the_checkpoint_with_the_budget(
    cluster: Cluster, machines: Machines
) -> None:
    first = max(cluster.worlds())
    os.kill(cluster.pid_of("b/0"), signal.SIGKILL)
    second = cluster.wait_training(*NODES, after=first)
    for node in NODES:
        cluster.agents[node].kill_node()
    for node in NODES:
        start(cluster, machines, node)
    cluster.wait_training(*NODES, after=second)
    see_it_end(cluster, restarts=1)


def test_two_wiped_at_once_lose_the_store_and_harm_nothing(cluster: Cluster, machines: Machines) -> None:
    first = max(cluster.worlds())
    for node in ("a", "b"):
        cluster.agents[node].kill_node()
        shutil.rmtree(cluster.folder / f"state-{node}" / "members")
    for node in ("a", "b"):
        start(cluster, machines, node)
    for node in ("a", "b"):
        cluster.wait_said(node, "it has lost its data, and cannot join again yet")
    for node in NODES:
        cluster.wait_said(node, "if a majority has lost its data", "remove the folder members")
    assert max(cluster.worlds()) == first
    assert cluster.wait_gone([cluster.pid_of("c/0")], AT_MOST_S) == []

    for node in NODES:  # as it says
        cluster.agents[node].kill_node()
    for node in NODES:
        shutil.rmtree(cluster.folder / f"state-{node}" / "members")
    for node in NODES:
        start(cluster, machines, node)
    cluster.wait_training(*NODES, after=first)
    check_safety(cluster)
    see_it_end(cluster, restarts=0)
