"""Nodes that are killed, frozen or asked to leave, and nodes that come."""

from __future__ import annotations

import signal

import pytest

from .cluster import SETTLE_S, SHORT_LEASE_S, SHORT_MARGIN_S
from .conftest import MakeCluster, on_both
from .rules import check_nothing_left, check_safety, see_it_end

pytestmark = [pytest.mark.system, pytest.mark.prove]

LIVENESS_S = 2 * SHORT_LEASE_S + SHORT_MARGIN_S + 3 * SETTLE_S + 1.0
"""The design's promise: how long after a fault the next world is there at the latest."""


@on_both
def test_the_run_continues_without_a_killed_node_which_gets_its_seat_back(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("2:3")
    cluster.start("a")
    b = cluster.start("b", 2)
    cluster.start("c")
    first = cluster.wait_training("a", "b", "c")

    b.kill_node()
    second = cluster.wait_training("a", "c", after=first)
    assert cluster.silence_s(second) < LIVENESS_S
    assert cluster.order_of(second) == [node for node in cluster.order_of(first) if node != "b"]

    cluster.start("b", 2)
    third = cluster.wait_training("a", "b", "c", after=second)
    assert cluster.world(first) == cluster.world(third)
    see_it_end(cluster, restarts=0)


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


def test_workers_of_a_frozen_agent_are_stopped_before_the_others_continue(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("1:3")
    cluster.start_host("a")
    b = cluster.start("b")
    first = cluster.wait_training("a", "b")

    worker = cluster.pid_of("b/0")
    b.freeze_agent()
    assert cluster.wait_gone([worker], SHORT_LEASE_S + SHORT_MARGIN_S) == []
    assert cluster.journal("workers_started")[-1]["generation"] == first, "the others went on before"
    second = cluster.wait_training("a", after=first)
    b.thaw()
    cluster.wait_training("a", "b", after=second)
    assert cluster.journal("fenced", "b")
    assert "this agent was paused for" in cluster.journal("lease_lost", "b")[-1]["reason"]
    see_it_end(cluster, restarts=0)


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


@on_both
def test_a_run_starts_with_the_desired_nodes_and_continues_with_fewer(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("1:3", "--desired-nodes", "2", "--desired-wait", "1000")
    cluster.start("a")
    cluster.wait_said("a", "waiting for 1 more node (--desired-nodes 2)")
    b = cluster.start("b")
    first = cluster.wait_training("a", "b")
    assert first == 1, "a did not train alone before"

    b.kill_node()
    cluster.wait_training("a", after=first)
    see_it_end(cluster, restarts=0, b=-signal.SIGKILL)
