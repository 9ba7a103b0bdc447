"""What happens when members of etcd, in which agents meet, are lost."""

from __future__ import annotations

import os
import signal

import pytest

from elastic_agent.testing.processes import NodeProcess
from tests.etcd import EtcdCluster

from .cluster import EXPIRING_LEASE_S
from .conftest import MakeCluster
from .rules import see_it_end

pytestmark = pytest.mark.system


@pytest.fixture
def etcd(three: EtcdCluster) -> str:
    """These agents meet there."""
    return three.endpoints


def is_cut_off(agent: NodeProcess) -> bool:
    """Return whether the agent said that it lost etcd, and did not say since that etcd answers again."""
    return len(agent.lines("lost the connection to the store")) > len(agent.lines("answers again"))


def test_neither_the_loss_of_a_member_of_etcd_nor_a_short_outage_affects_a_run(
    make_cluster: MakeCluster, three: EtcdCluster
) -> None:
    """Workers go on while all members are away for less than a lease; two suffice for the next generation."""
    cluster = make_cluster("2", alone=True)
    cluster.start("a")
    cluster.start("b", 2)
    first = cluster.wait_training("a", "b")
    cluster.wait("all workers to be born", lambda: len(cluster.born()) == 3 or None)
    for member in three.members:
        member.kill()
    agents = [*cluster.agents.values()]
    cluster.wait("the outage to be noticed", lambda: all(map(is_cut_off, agents)) or None)
    for member in three.members:
        member.start()
    cluster.wait("its end to be noticed", lambda: not any(map(is_cut_off, agents)) or None)
    assert max(cluster.worlds()) == first, cluster.story()
    assert len(cluster.born()) == 3, "no worker was restarted"

    three.leader().kill()
    os.kill(cluster.pid_of("b/1"), signal.SIGKILL)
    cluster.wait_training("a", "b", after=first)
    assert not cluster.journal("lease_lost"), cluster.story()
    see_it_end(cluster, restarts=1)


def test_an_outage_of_etcd_that_lasts_stops_all_workers_until_it_is_back(
    make_cluster: MakeCluster, three: EtcdCluster
) -> None:
    """The guards kill them when the leases expire. Then the same world trains again, and nothing is charged."""
    cluster = make_cluster("2", alone=True, lease_s=EXPIRING_LEASE_S)
    first = cluster.start_training("a", "b")
    a = cluster.agents["a"]
    for member in three.members:
        member.kill()
    cluster.wait_gone([worker["pid"] for worker in cluster.born()])
    for node in "ab":
        cluster.wait_event("lease_lost", node)
    for member in three.members:
        member.start()
    second = cluster.wait_training("a", "b", after=first)
    assert cluster.world(first) == cluster.world(second)
    assert a.runs
    see_it_end(cluster, restarts=0)
