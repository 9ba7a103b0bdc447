"""Workers that are killed, or fail again and again: when the run goes on, and when it is given up."""

from __future__ import annotations

import os
import signal

import pytest

from elastic_agent.testing.processes import freeze

from .conftest import MakeCluster, on_both
from .rules import see_it_end

pytestmark = [pytest.mark.system, pytest.mark.prove]


@on_both
def test_a_worker_and_another_node_lost_at_once_cost_no_restart(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("1:3")
    cluster.start("a")
    cluster.start("b")
    c = cluster.start("c")
    first = cluster.wait_training("a", "b", "c")
    freeze(c.pid)  # it does not clear itself after the worker's end, however long the next line takes
    os.kill(cluster.pid_of("a/0"), signal.SIGKILL)
    c.kill_node()
    second = cluster.wait_training("a", "b", after=first)
    assert second == first + 1  # no world was tried before the lost node was cleared
    see_it_end(cluster, restarts=0, c=-signal.SIGKILL)
