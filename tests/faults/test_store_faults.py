"""The store's host dies, freezes or comes back; runs share a store."""

from __future__ import annotations

import pytest

from .conftest import MakeCluster
from .rules import check_nothing_left, check_safety, see_it_end

pytestmark = [pytest.mark.system, pytest.mark.prove]


def test_a_frozen_store_host_stops_all_nodes_until_it_thaws(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("2")
    first = cluster.start_training("a", "b")
    a = cluster.agents["a"]
    frozen = cluster.pid_of("a/0")
    a.freeze_node()
    cluster.wait_event("lease_lost", "b")
    cluster.wait_said("b", "waiting for the store", "accepts connections but did not answer")
    a.thaw()
    second = cluster.wait_training("a", "b", after=first)
    assert cluster.wait_gone([frozen]) == []
    assert cluster.world(first) == cluster.world(second)
    see_it_end(cluster, restarts=0, paused={"a"})


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
