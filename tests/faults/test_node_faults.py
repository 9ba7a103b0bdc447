"""Nodes that are killed, frozen or asked to leave, and nodes that come."""

from __future__ import annotations

import signal

import pytest

from .cluster import SHORT_LEASE_S
from .conftest import MakeCluster, on_both
from .rules import check_nothing_left, check_safety, see_it_end

pytestmark = [pytest.mark.system, pytest.mark.prove]


@on_both
def test_a_node_that_thaws_after_its_lease_rejoins_without_effect_on_others(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("1:3")
    cluster.start_host("a")
    b = cluster.start("b")
    first = cluster.wait_training("a", "b")

    b.freeze_node()
    frozen = cluster.pid_of("b/0")
    second = cluster.wait_training("a", after=first)
    b.thaw()
    third = cluster.wait_training("a", "b", after=second)
    assert third == second + 1  # it came in by the front door, once
    assert cluster.wait_gone([frozen]) == []
    lives = [one["incarnation"] for one in cluster.journal("registered", "b")]
    assert len(lives) == len({*lives}) == 2
    see_it_end(cluster, restarts=0, paused={"b"})


@on_both
def test_nodes_that_leave_at_the_same_time_do_not_wait_for_each_other(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("2")
    a, b = cluster.start("a"), cluster.start("b")
    cluster.wait_training("a", "b")
    a.terminate()
    b.terminate()
    ends = set(cluster.wait_end().values())
    assert 75 in ends, "the run is stopped with its last node"
    assert ends <= {6, 75}, cluster.story()
    asked, *_, over = (
        one["boottime_s"] for one in cluster.journal() if one["event"] in ("drain", "agent_ended")
    )
    assert over - asked < SHORT_LEASE_S, cluster.story()
    check_safety(cluster)
    check_nothing_left(cluster)


def test_survivors_below_min_wait_and_then_continue(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("2:3")
    a = cluster.start("a")
    b = cluster.start("b", 2)
    first = cluster.wait_training("a", "b")
    b.kill_node()
    cluster.wait_event("workers_stopped", "a", generation=first)
    cluster.wait_said("a", "waiting for 1 more node (at least 2 required)", "a (1 worker)")
    cluster.wait_said("a", "waiting for b (127.0.0.1), lost at", "start the same command there again")
    assert "not started yet" not in a.said(), "it was there before"
    cluster.start("c", 2)
    second = cluster.wait_training("a", "c", after=first)
    assert cluster.world(second) == {"a": (1, 0), "c": (2, 1)}
    assert a.process.poll() is None
    see_it_end(cluster, restarts=0, b=-signal.SIGKILL)


def test_a_node_above_max_stands_by_and_replaces_one_that_leaves(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("2")
    cluster.start("a")
    b = cluster.start("b")
    first = cluster.wait_training("a", "b")
    cluster.start("c")
    cluster.wait_said("c", "on standby", "runs with 2 nodes (maximum 2)")
    assert max(one["generation"] for one in cluster.steps()) == first
    b.terminate()
    second = cluster.wait_training("a", "c", after=first)
    assert cluster.world(second) == {"a": (1, 0), "c": (1, 1)}
    see_it_end(cluster, restarts=0, b=6)
