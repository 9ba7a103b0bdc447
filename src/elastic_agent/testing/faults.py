"""The faults that can be injected into a :class:`LocalCluster`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic_agent import linux
from elastic_agent.testing.cluster import ClusterError, LocalCluster
from elastic_agent.testing.records import Line

SLOW_SAVE_S = 3.0
"""By how much ``slow-disk`` delays a save."""


@dataclass(frozen=True)
class Injected:
    """What was done to a run."""

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


def _choose_node(cluster: LocalCluster, rng: random.Random) -> str:
    return rng.choice([name for name in cluster.names if name not in cluster.spared])


def _worker_killed(cluster: LocalCluster, rng: random.Random) -> Injected:
    worker, pid = _choose_worker(cluster, rng)
    at_s = linux.boottime_s()
    cluster.kill_worker(worker)
    return Injected(f"worker {worker} (process {pid}) killed by SIGKILL", at_s)


def _worker_killed_saving(cluster: LocalCluster, rng: random.Random) -> Injected:
    seen = len(cluster.records("killed_saving"))
    order = cluster.order("die-saving")
    try:
        line = cluster.wait(
            "the next save of a checkpoint",
            lambda: (
                next(iter(cluster.records("killed_saving")[seen:]), None)
                or (cluster.is_over() and {"worker": ""})
                or None
            ),
        )
    finally:
        order.unlink(missing_ok=True)
    if not line["worker"]:
        raise ClusterError("the run ended before the next save of a checkpoint")
    what = f"worker {line['worker']} killed by SIGKILL while it saved {line['path'] or 'a checkpoint'}"
    return Injected(what, float(line["boottime_s"]))


def _worker_oom(cluster: LocalCluster, rng: random.Random) -> Injected:
    workers = cluster.workers()
    worker = max(workers, key=lambda one: linux.resident_bytes(workers[one]))
    at_s = linux.boottime_s()
    cluster.kill_worker(worker)
    return Injected(f"worker {worker}, which uses most memory, killed by SIGKILL as by the OOM killer", at_s)


def _worker_stopped(cluster: LocalCluster, rng: random.Random) -> Injected:
    worker, _ = _choose_worker(cluster, rng)
    generation, at_s = cluster.generation, linux.boottime_s()
    pid = cluster.stop_worker(worker)
    what = f"worker {worker} stopped by SIGSTOP"
    try:
        cluster.wait(
            "the agents to replace it", lambda: cluster.generation > generation, cluster.hang_timeout_s + 20
        )
    except ClusterError:
        cluster.continue_worker(pid)
        return Injected(f"{what}, continued {linux.boottime_s() - at_s:.0f} s later", at_s, restarts=False)
    return Injected(what, at_s)


def _node_killed(cluster: LocalCluster, rng: random.Random) -> Injected:
    name = _choose_node(cluster, rng)
    at_s = linux.boottime_s()
    cluster.agents[name].kill_node()
    return Injected(
        f"all processes of {name} killed, later replaced", at_s, name, lambda: cluster.start(name)
    )


def _node_frozen(cluster: LocalCluster, rng: random.Random) -> Injected:
    name = _choose_node(cluster, rng)
    at_s = linux.boottime_s()
    cluster.agents[name].freeze_node()
    return Injected(
        f"all processes of {name} stopped, later continued", at_s, name, cluster.agents[name].thaw
    )


def _partition(cluster: LocalCluster, rng: random.Random) -> Injected:
    name = _choose_node(cluster, rng)
    at_s = linux.boottime_s()
    cluster.cut_off(name)
    what = f"{name} cut off from the store, later reconnected"
    return Injected(what, at_s, name, lambda: cluster.reconnect(name))


def _join(cluster: LocalCluster, rng: random.Random) -> Injected:
    name = f"node-{chr(ord('a') + len(cluster.names))}"
    at_s = linux.boottime_s()
    cluster.start(name)
    return Injected(f"{name} joins", at_s)


def _drain(cluster: LocalCluster, rng: random.Random) -> Injected:
    name = _choose_node(cluster, rng)
    at_s = linux.boottime_s()
    cluster.command("drain", name)
    what = f"elastic-agent drain {name}, later replaced"
    return Injected(what, at_s, name, lambda: _restart(cluster, name))


def _preempted(cluster: LocalCluster, rng: random.Random) -> Injected:
    name = _choose_node(cluster, rng)
    at_s = linux.boottime_s()
    cluster.agents[name].terminate()
    return Injected(
        f"SIGTERM to the agent of {name}, later replaced", at_s, name, lambda: _restart(cluster, name)
    )


def _restart(cluster: LocalCluster, name: str) -> None:
    cluster.wait_end(name)
    cluster.start(name)


def _stop(cluster: LocalCluster, rng: random.Random) -> Injected:
    at_s = linux.boottime_s()
    cluster.command("stop")
    cluster.wait_end()
    for name in cluster.names:
        cluster.start(name, new_machine=False)
    return Injected("elastic-agent stop, then all nodes started again", at_s)


def _slow_disk(cluster: LocalCluster, rng: random.Random) -> Injected:
    delayed = len(_delayed(cluster))
    order = cluster.order("slow-save", str(SLOW_SAVE_S))
    try:
        cluster.wait("a save", lambda: len(_delayed(cluster)) > delayed or cluster.is_over())
    finally:
        order.unlink(missing_ok=True)
    if len(_delayed(cluster)) == delayed:
        raise ClusterError("the run ended before the next save of a checkpoint")
    at_s = _delayed(cluster)[delayed]["boottime_s"] - SLOW_SAVE_S
    return Injected(f"a save takes {SLOW_SAVE_S:g} s longer", at_s, restarts=False)


def _delayed(cluster: LocalCluster) -> list[Line]:
    return [line for line in cluster.records("saved") if line["delay_s"]]


def _store_lost(cluster: LocalCluster, rng: random.Random) -> Injected:
    at_s = linux.boottime_s()
    cluster.agents[cluster.host].kill_node()
    cluster.start(cluster.host)
    return Injected(
        f"all processes of {cluster.host}, which hosts the store, killed; node started again", at_s
    )


FAULTS: dict[str, Fault] = {
    "worker-killed": Fault("SIGKILL to a worker", _worker_killed),
    "worker-killed-saving": Fault(
        "SIGKILL to a worker that has written half of a checkpoint", _worker_killed_saving
    ),
    "worker-stopped": Fault("SIGSTOP to a worker", _worker_stopped),
    "worker-oom": Fault("SIGKILL to the worker with most memory, as by the OOM killer", _worker_oom),
    "node-killed": Fault("SIGKILL to all processes of a node; later replaced", _node_killed, 2),
    "node-frozen": Fault("SIGSTOP to all processes of a node; later continued", _node_frozen, 2),
    "partition": Fault("a node is cut off from the store; later reconnected", _partition, 2),
    "join": Fault("one more node", _join),
    "drain": Fault("elastic-agent drain of a node; later replaced", _drain, 2),
    "preempted": Fault("SIGTERM to the agent of a node; later replaced", _preempted, 2),
    "stop": Fault("elastic-agent stop, then all nodes are started again", _stop),
    "slow-disk": Fault(f"a save takes {SLOW_SAVE_S:g} s longer", _slow_disk),
    "store-lost": Fault("SIGKILL to all processes of the node that hosts the store", _store_lost, 2),
}
"""By name."""

DEFAULT = ("worker-killed", "worker-killed-saving", "node-killed", "drain")
"""What is injected if nothing else is asked for."""


def needs_nodes(plan: Sequence[str]) -> int:
    """With how many nodes all of these are possible."""
    return max((FAULTS[name].least_nodes for name in plan), default=1)
