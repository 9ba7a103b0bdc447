"""Faults that only the agents can tell from those of ``elastic-agent chaos``."""

from __future__ import annotations

import random
import signal

from elastic_agent import linux
from elastic_agent.testing import LocalCluster
from elastic_agent.testing.faults import FAULTS, Fault, Injected, choose_node, restart_node

from .cluster import SoakCluster


def _node_frozen(cluster: LocalCluster, rng: random.Random) -> Injected:
    name = choose_node(cluster, rng)
    at_s = linux.boottime_s()
    cluster.agents[name].freeze_node()
    what = f"all processes of {name} stopped, later continued"
    return Injected(what, at_s, name, cluster.agents[name].thaw)


def _partition(cluster: LocalCluster, rng: random.Random) -> Injected:
    assert isinstance(cluster, SoakCluster)
    name = choose_node(cluster, rng)
    at_s = linux.boottime_s()
    cluster.cut_off(name)
    what = f"{name} cut off from the store, later reconnected"
    return Injected(what, at_s, name, lambda: cluster.reconnect(name))


def _preempted(cluster: LocalCluster, rng: random.Random) -> Injected:
    name = choose_node(cluster, rng)
    at_s = linux.boottime_s()
    cluster.agents[name].signal(signal.SIGTERM)
    what = f"SIGTERM to the agent of {name}, later replaced"
    return Injected(what, at_s, name, lambda: restart_node(cluster, name))


SOAK_FAULTS: dict[str, Fault] = {
    **FAULTS,
    "node-frozen": Fault("SIGSTOP to all processes of a node; later continued", _node_frozen),
    "partition": Fault("a node is cut off from the store; later reconnected", _partition),
    "preempted": Fault("SIGTERM to the agent of a node; later replaced", _preempted),
}
"""By name."""
