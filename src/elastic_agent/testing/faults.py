"""The faults that can be injected into a :class:`LocalCluster`: those that a training script can tell from each other.

What only the agents notice, as a node without a network, is for their own tests.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass

from elastic_agent import linux
from elastic_agent.testing.cluster import DIE_SAVING, ClusterError, LocalCluster
from elastic_agent.testing.processes import freeze, thaw


@dataclass(frozen=True)
class Injected:
    """A fault that was injected into a run."""

    what: str
    at_s: float
    """CLOCK_BOOTTIME."""
    without: str | None = None
    """The node that the others have to do without until :attr:`repair`."""
    repair: Callable[[], object] | None = None
    """Brings the node back."""
    restarts: bool = True
    """Workers are restarted: training continues in another generation."""


@dataclass(frozen=True)
class Fault:
    """A kind of fault."""

    help: str
    inject: Callable[[LocalCluster, random.Random], Injected]
    least_nodes: int = 1


def _choose_worker(cluster: LocalCluster, rng: random.Random) -> tuple[str, int]:
    workers = sorted(cluster.workers().items())
    if not workers:
        raise ClusterError("no worker runs")
    return rng.choice(workers)


def choose_node(cluster: LocalCluster, rng: random.Random) -> str:
    """Choose a node that a fault of a whole node may hit."""
    return rng.choice([name for name in cluster.names if name not in cluster.spared])


def _worker_killed(cluster: LocalCluster, rng: random.Random) -> Injected:
    worker, pid = _choose_worker(cluster, rng)
    at_s = linux.boottime_s()
    linux.send_signal(pid, signal.SIGKILL)
    return Injected(f"worker {worker} (process {pid}) killed by SIGKILL", at_s)


def _worker_killed_saving(cluster: LocalCluster, rng: random.Random) -> Injected:
    seen = len(cluster.records("killed_saving"))
    request = cluster.folder / DIE_SAVING
    request.touch()
    try:
        cluster.wait(
            "the next save of a checkpoint",
            lambda: len(cluster.records("killed_saving")) > seen or cluster.is_over(),
        )
    finally:
        request.unlink(missing_ok=True)
    killed = cluster.records("killed_saving")[seen:]
    if not killed:
        raise ClusterError("the run ended before the next save of a checkpoint")
    worker, path = killed[0]["worker"], killed[0]["path"]
    description = f"worker {worker} killed by SIGKILL while it saved {path or 'a checkpoint'}"
    return Injected(description, float(killed[0]["boottime_s"]))


def _worker_stopped(cluster: LocalCluster, rng: random.Random) -> Injected:
    worker, pid = _choose_worker(cluster, rng)
    generation, at_s = cluster.generation, linux.boottime_s()
    freeze(pid)
    description = f"worker {worker} stopped by SIGSTOP"
    limit_s = cluster.hang_timeout_s + 20
    try:
        cluster.wait("the agents to replace it", lambda: cluster.generation > generation, limit_s)
    except ClusterError:
        thaw(pid)
        continued = f"{description}, continued {linux.boottime_s() - at_s:.0f} s later"
        return Injected(continued, at_s, restarts=False)
    return Injected(description, at_s)


def _node_killed(cluster: LocalCluster, rng: random.Random) -> Injected:
    name = choose_node(cluster, rng)
    at_s = linux.boottime_s()
    cluster.agents[name].kill_node()
    description = f"all processes of {name} killed, later replaced"
    return Injected(description, at_s, name, lambda: cluster.start(name))


def _join(cluster: LocalCluster, rng: random.Random) -> Injected:
    name = f"node-{chr(ord('a') + len(cluster.names))}"
    at_s = linux.boottime_s()
    cluster.start(name)
    return Injected(f"{name} joins", at_s)


def _drain(cluster: LocalCluster, rng: random.Random) -> Injected:
    name = choose_node(cluster, rng)
    at_s = linux.boottime_s()
    cluster.command("drain", name)
    description = f"elastic-agent drain {name}, later replaced"
    return Injected(description, at_s, name, lambda: restart_node(cluster, name))


def restart_node(cluster: LocalCluster, name: str) -> None:
    """Have a new machine take the place of a node that leaves."""
    cluster.wait_end(name)
    cluster.start(name)


def _stop(cluster: LocalCluster, rng: random.Random) -> Injected:
    at_s = linux.boottime_s()
    cluster.command("stop")
    cluster.wait_end()
    for name in cluster.names:
        cluster.start(name, new_machine=False)
    return Injected("elastic-agent stop, then all nodes started again", at_s)


FAULTS: dict[str, Fault] = {
    "worker-killed": Fault("SIGKILL to a worker", _worker_killed),
    "worker-killed-saving": Fault(
        "SIGKILL to a worker that has written half of a checkpoint", _worker_killed_saving
    ),
    "worker-stopped": Fault("SIGSTOP to a worker", _worker_stopped),
    "node-killed": Fault("SIGKILL to all processes of a node; later replaced", _node_killed, 2),
    "join": Fault("one more node", _join),
    "drain": Fault("elastic-agent drain of a node; later replaced", _drain, 2),
    "stop": Fault("elastic-agent stop, then all nodes are started again", _stop),
}
"""By name."""

DEFAULT = ("worker-killed", "worker-killed-saving", "node-killed", "drain")
"""The faults that are injected if no others are asked for."""
