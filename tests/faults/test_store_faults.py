"""The store's host dies, freezes or comes back; runs share a store."""

from __future__ import annotations

import signal

import pytest

from .conftest import MakeCluster
from .rules import check_nothing_left, check_safety, see_it_end

pytestmark = [pytest.mark.system, pytest.mark.prove]


def test_a_frozen_store_host_stops_all_nodes_until_it_thaws(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("2")
    a = cluster.start_host("a")
    cluster.start("b")
    first = cluster.wait_training("a", "b")
    frozen = cluster.pid_of("a/0")
    a.freeze_node()
    cluster.wait_event("lease_lost", "b")
    cluster.wait_said("b", "waiting for the store", "accepts connections but did not answer")
    a.thaw()
    second = cluster.wait_training("a", "b", after=first)
    assert cluster.wait_gone([frozen]) == []
    assert cluster.world(first) == cluster.world(second)
    see_it_end(cluster, restarts=0, paused={"a"})


def test_a_run_whose_processes_were_all_killed_resumes_above_its_generation(
    make_cluster: MakeCluster,
) -> None:
    """No run id and no node ids are given: the agents agree on them, and find them again."""
    cluster = make_cluster("2", "--max-restarts", "1", run_id=None)

    def start_both() -> list[str]:
        """One after the other, so that it is known which of them is the machine's first."""
        for name, slots in (("one", 1), ("two", 2)):
            count = len(cluster.journal("agent_started"))
            cluster.start(name, slots, node_id=None)
            cluster.wait(f"the start of {name}", lambda: len(cluster.journal("agent_started")) > count)  # noqa: B023
        return [line["node"] for line in cluster.journal("agent_started")[-2:]]

    nodes = start_both()
    assert nodes[1] == f"{nodes[0]}-2"
    first = cluster.wait_training(*nodes)
    cluster.order(f"{nodes[0]}/0", "exit")
    second = cluster.wait_training(*nodes, after=first)

    for agent in cluster.agents.values():
        agent.kill_node()
    assert cluster.wait_end() == {"one": -signal.SIGKILL, "two": -signal.SIGKILL}
    assert start_both() == nodes
    third = cluster.wait_training(*nodes, after=second)
    assert cluster.world(first) == cluster.world(second) == cluster.world(third)
    assert len({one["run_id"] for one in cluster.born()}) == 1
    see_it_end(cluster, restarts=1)


def test_a_store_host_that_leaves_serves_until_the_run_is_over(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("1:2")
    a = cluster.start_host("a")
    b = cluster.start("b")
    first = cluster.wait_training("a", "b")
    a.terminate()
    second = cluster.wait_training("b", after=first)
    cluster.wait_said("a", f"keeping the rendezvous store up for run {cluster.run_id}")
    assert cluster.pid_of("a/0") not in cluster.marked_processes()
    assert not b.lines("the store was restarted empty")
    assert second == first + 1
    see_it_end(cluster, restarts=0, a=6)


def test_two_runs_share_a_store_that_serves_until_both_are_over(make_cluster: MakeCluster) -> None:
    host = make_cluster("1")
    other = make_cluster("1", port=host.port)
    host.start_host("a")
    other.start("a")
    host.wait_training("a")
    first = other.wait_training("a")
    other.order("a/0", "exit")
    other.wait_training("a", after=first)

    host.let_finish()
    host.wait_said("a", f"keeping the rendezvous store up for run {other.run_id}")
    see_it_end(other, restarts=1)
    assert host.wait_end() == {"a": 0}
    assert len(host.worlds()) == 1
    check_safety(host)
    check_nothing_left(host)
