"""Directed scenarios: a fixed universe in which the given faults happen at the given times, and nothing else.

A :class:`Directed` gives what a seed would draw: the nodes, the policy, where the store lives, and every fault with
its time. All other choices (delays, slots, pauses) are the middle of what may be drawn (:class:`.kernel.Middle`), so
no scenario depends on how many random numbers the code under test draws.

Every node starts at 0.15 s, and all are ready soon after. The faults are over at ``quiet_s``: what is down is started
again then, and training ends about a second later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from elastic_agent.protocol.records import Cause, Failure, FailureKind, Plan, Policy

from .agent import Agent
from .cluster import Cluster, Seatholder
from .etcd import Etcd
from .faults import Faults
from .guard import Group
from .kernel import Process
from .machine import Machine
from .run import Result, run_cluster
from .scenario import Scenario

POLICY = Policy(
    min_nodes=1,
    max_nodes=3,
    lease_ttl_s=2.0,
    fence_margin_s=0.4,
    settle_s=0.1,
    join_timeout_s=20.0,
    start_timeout_s=5.0,
    notice_s=5.0,
    restart_window_s=0.0,
)


@dataclass(frozen=True)
class Step:
    """One fault: a method of :class:`Script`, and when it is called."""

    at_s: float
    fault: str
    args: tuple[Any, ...]
    options: Mapping[str, Any]


def at(at_s: float, fault: str, *args: Any, **options: Any) -> Step:
    """Have this happen at this time; ``fault`` names a method of :class:`Script`."""
    return Step(at_s, fault, args, options)


@dataclass(frozen=True, kw_only=True)
class Directed:
    """One directed scenario."""

    name: str
    rule: str
    """The rule that it is about, in a sentence."""
    end: str
    """How it ends with the shipped code: outcome, its generation, charged failures."""
    steps: tuple[Step, ...] = ()
    nodes: int = 3
    hosting: str = "serve"
    policy: Mapping[str, Any] = field(default_factory=dict)
    """What differs from :data:`POLICY`."""
    universe: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the defaults of :class:`Scenario`."""
    quiet_s: float = 15.0

    @property
    def scenario(self) -> Scenario:
        """The circumstances in the form that a seed would draw."""
        policy = msgspec.structs.replace(POLICY, **self.policy)
        given: dict[str, Any] = {
            "kill_max_s": 0.95 * policy.fence_margin_s,
            "faults": ("directed",),
            "quiet_s": self.quiet_s,
        }
        return Scenario(nodes=self.nodes, policy=policy, hosting=self.hosting, **{**given, **self.universe})

    def run(self, *, tell: bool = False) -> Result:
        """Run it."""
        cluster = Cluster(0, scenario=self.scenario, tell=tell)
        return run_cluster(cluster, partial(Script, steps=self.steps))


class Script(Faults):
    """Carries out the steps of a directed scenario. Nodes are named ``n0``, ``n1``, …, machines ``m0``, ``m1``, …"""

    def __init__(self, cluster: Cluster, steps: tuple[Step, ...]) -> None:
        self._steps = steps
        self._lasts_s = 0.0
        super().__init__(cluster)

    def _plan_strikes(self) -> None:
        for step in self._steps:
            self.kernel.after(step.at_s, self._carry_out, step)

    def _carry_out(self, step: Step) -> None:
        self.cluster.trouble()
        getattr(self, step.fault)(*step.args, **step.options)

    def spring(self, kind: Any, victim: Seatholder | None) -> None:
        """A node or a coordinator has come to the point for which :meth:`when` waits."""
        self.kernel.after(0.0, self._carry_out, kind)

    def when(self, node: str | None, point: str, fault: str, *args: Any, **options: Any) -> None:
        """Have a fault happen when a node, or a coordinator (None), next comes to this point (``Cluster.at``)."""
        holder = self.node(node) if node is not None else None
        self.cluster.traps.append((point, Step(0.0, fault, args, options), holder))

    def node(self, name: str) -> Seatholder:
        """The node with this id that came last."""
        return next(holder for holder in reversed(self.cluster.holders) if holder.node_id == name)

    def agent(self, name: str) -> Agent:
        """The present agent of this node."""
        agent = self.node(name).agent
        assert agent is not None, f"{name} has not been started"
        return agent

    def leader(self) -> Agent:
        """The agent that coordinates the run in etcd."""
        agent = self._is_leader()
        assert agent is not None, "no agent coordinates the run"
        return agent

    def machine(self, name: str) -> Machine:
        """The machine of this name."""
        machines = (*self.cluster.machines, self.cluster.endpoint.machine)
        return next(machine for machine in machines if machine.name == name)

    # -- agents and machines --------------------------------------------------------------------

    def crash(self, node: str, back_s: float | None = None) -> None:
        """Kill the agent; start it again after ``back_s``."""
        self.cluster.crash_agent(self.node(node), back_s)

    def freeze(self, process: Process | str, for_s: float = 0.0) -> None:
        """Let an agent stand still, or the process that came to :meth:`freeze_at_reading`."""
        if isinstance(process, str):
            self._stand_still(self.agent(process).process, for_s)
        else:
            self._stand_still(process, self._lasts_s)

    def _stand_still(self, process: Process, for_s: float) -> None:
        self.cluster.story(process.name, "stands still for {} s", for_s)
        process.freeze()
        self._undo_after(for_s, process.thaw)

    def power_off(self, node: str, back_s: float | None = None) -> None:
        """The machine loses power; it is back after ``back_s``."""
        machine = self.node(node).machine
        self.cluster.story(machine.name, "loses power")
        machine.crash()
        if back_s is not None:
            self.kernel.after(back_s, self._boot, machine)

    def join(self, node: str, machine: str | None = None) -> None:
        """A new node, on a machine of its own or on this one."""
        at_machine = self.machine(machine) if machine else self.cluster.machine_for(int(node[1:]))
        self.cluster.add_node(at_machine, node)

    def impostor(self, node: str, index: int = 7) -> None:
        """A second agent with the id of this node, on a machine of its own."""
        machine = self.cluster.machine_for(index)
        self.cluster.add_node(machine, node, impostor=True)

    # -- the network ----------------------------------------------------------------------------

    def cut(self, node: str, for_s: float) -> None:
        """Cut a machine off from the store; what is sent meanwhile arrives a second after the end."""
        self.cluster.network.cut.add(self.node(node).machine.name)
        self._reaches_again(node, for_s)

    def deafen(self, node: str, for_s: float) -> None:
        """Hold the store's answers to a machine back; a second after the end they arrive."""
        self.cluster.network.deaf.add(self.node(node).machine.name)
        self._reaches_again(node, for_s)

    def _reaches_again(self, node: str, for_s: float) -> None:
        name = self.node(node).machine.name
        self.cluster.story(name, "is cut off or deaf for {} s", for_s)
        self._undo_after(for_s, partial(self.cluster.network.heal, name))

    def slow(self, node: str, way: str, extra_s: float, for_s: float) -> None:
        """Have ``requests`` or ``answers`` of a machine take half of ``extra_s`` longer."""
        key = self.node(node).machine.name, way
        self.cluster.network.slow_s[key] = extra_s
        self._undo_after(for_s, lambda: self.cluster.network.slow_s.pop(key, None))  # type: ignore[arg-type]

    # -- workers --------------------------------------------------------------------------------

    def compute_alone(self) -> None:
        """From now on workers do not notice that those of other nodes are gone."""
        self.cluster.job.peers_notice = False

    def group(self, node: str) -> Group:
        """The present workers of this node."""
        group = self.agent(node).guard.group
        assert group is not None, f"{node} has no workers"
        return group

    def fail(self, node: str, signature: str = "") -> None:
        """A worker fails."""
        self._fail(node, FailureKind.WORKER, "exit code 1", signature)

    def _fail(self, node: str, kind: FailureKind, words: str, signature: str) -> None:
        group = self.group(node)
        failure = Failure(kind, f"{group.agent.name}: {words}", signature=signature)
        group.agent.guard.process.do(self.cluster.job.fail, group, failure)

    def succeed(self, node: str) -> None:
        """All workers of the node exit with 0."""
        group = self.group(node)
        group.agent.guard.process.do(self.cluster.job.succeed, group)

    def break_script(self, for_s: float) -> None:
        """Have every worker fail soon after its start, with the same error."""
        job = self.cluster.job
        job.broken = "b1"
        self._undo_after(for_s, lambda: setattr(job, "broken", ""))

    def park_after(self, node: str, takes_s: float = float("inf")) -> None:
        """Have the node's workers take so long to park the next time."""
        self.node(node).parking_s = takes_s

    def fence(self, node: str) -> None:
        """The node's lease is over."""
        self.agent(node).fenced("its lease is over")

    def end_parked(self, node: str) -> None:
        """A parked worker of the node ends."""
        self.agent(node).guard.parked_ends()

    def fail_starts(self, node: str, count: int) -> None:
        """So many starts of workers fail, or their going on in another world."""
        self.node(node).failing_starts = count + 1

    def hang_starts(self, node: str, count: int) -> None:
        """So many starts of workers never end."""
        self.node(node).hanging_starts = count + 1

    def hang_stops(self, node: str) -> None:
        """Have the agent not get on with the next stop of its workers."""
        self.node(node).hanging_stops = 2

    def no_port(self, node: str, for_s: float) -> None:
        """Leave the node no port for a bootstrap store."""
        holder = self.node(node)
        holder.portless = True
        self._undo_after(for_s, lambda: setattr(holder, "portless", False))

    # -- requests -------------------------------------------------------------------------------

    def drain(self, node: str) -> None:
        """The node is to leave after all workers have saved."""
        self._drain_in_good_order(self.node(node))

    def stop(self, node: str, cause: Cause = Cause.PREEMPTED, left_s: float = 10.0) -> None:
        """Have the run end."""
        agent = self.agent(node)
        agent.process.do(agent.asking.stop, cause, left_s)

    # -- the store, its coordinator and the disks -----------------------------------------------

    def lose_store(self, back_s: float, *, with_disk: bool = False) -> None:
        """Kill the store's process, or delete etcd's data; a new, empty store comes after ``back_s``.

        ``with_disk``: its machine forgets what its agents knew of the run, too.
        """
        cluster, host = self.cluster, self.cluster.endpoint.host
        assert host is not None, "there is no store"
        if with_disk:
            cluster.endpoint.machine.disk = None
        cluster.story(host.name, "is lost")
        if cluster.scenario.hosting == "agent":
            for holder in cluster.holders:
                if holder.agent is not None and holder.agent.process is host:
                    cluster.crash_agent(holder, back_s)
            return
        host.kill()
        self.kernel.after(back_s, cluster.serve)

    def etcd(self) -> Etcd:
        """The etcd that is the store."""
        store = self.cluster.endpoint.store
        assert isinstance(store, Etcd)
        return store

    def pause(self, node: str, for_s: float) -> None:
        """Let the whole machine stand still."""
        machine = self.node(node).machine
        self.cluster.story(machine.name, "pauses for {} s", for_s)
        machine.pause()
        self._undo_after(for_s, machine.resume)

    def stick(self, node: str) -> None:
        """The next workers cannot be killed in time."""
        self.node(node).unkillable_stops = 1

    def drain_other(self, node: str, leaver: str, left_s: float = 10.0) -> None:
        """A user at one node has another leave."""
        for holder in self.cluster.holders:
            holder.wanted &= holder.node_id != leaver
        self.cluster.told_to_leave.add(leaver)
        agent = self.agent(node)
        agent.process.do(agent.asking.drain_other, leaver, left_s)

    def depose(self) -> None:
        """The leader key vanishes under its holder."""
        self.etcd().vacate("is lost")

    def etcd_loses_data(self, away: Mapping[str, float], disk: Plan | None = None) -> None:
        """etcd loses its data; the nodes are away for so long, and n7, which may know another run, is elected."""
        for node, for_s in away.items():
            self.cut(node, for_s)
        self.cluster.endpoint.may_forget = True
        self.etcd().process.kill()
        self.cluster.serve()
        self.join("n7")
        self.node("n7").machine.disk = disk

    def with_leader(self, fault: str, **options: Any) -> None:
        """Have a fault happen to the node whose agent coordinates."""
        getattr(self, fault)(self.leader().holder.node_id, **options)

    def without_leader(self, fault: str, **options: Any) -> None:
        """Have a fault happen to the first node whose agent does not coordinate."""
        leader = self.leader().holder
        other = next(holder for holder in self.cluster.holders if holder is not leader)
        getattr(self, fault)(other.node_id, **options)

    def crash_at(self, point: str) -> None:
        """Kill the coordinator's process at a call, a ``store request`` of one, or when a plan is ``published``."""
        self.cluster.armed = (point, "die")

    def freeze_at_reading(self, for_s: float) -> None:
        """Let the coordinator stand still just before it next reads."""
        self.cluster.armed = ("read", "freeze")
        self._lasts_s = for_s

    def fill_disk(self, machine: str, for_s: float) -> None:
        """Let nothing be written to a disk."""
        full = self.machine(machine)
        full.disk_is_full = True
        self._undo_after(for_s, lambda: setattr(full, "disk_is_full", False))

    def lose_hints(self, for_s: float) -> None:
        """Lose every hint to the coordinator and all news."""
        store = self.cluster.endpoint.store
        assert store is not None, "there is no store"
        store.hint_loss = 1.0
        self._undo_after(for_s, lambda: setattr(store, "hint_loss", 0.0))
