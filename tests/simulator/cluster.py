"""The simulated universe: machines, nodes, agents, the endpoint with the store, the job, the checker."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from elastic_agent.protocol.node import Grace, Outcome
from elastic_agent.protocol.records import Address, Phase, Plan, Policy, Refusal
from elastic_agent.values import SHORTEST_LEASE_S

from .agent import Agent, Offer
from .checker import Checker
from .coordination import Coordination, HostedCoordinator
from .etcd import Etcd, EtcdConnection
from .guard import Group
from .job import Job
from .kernel import Kernel, Middle, Process
from .machine import Machine
from .network import Connection, Network
from .scenario import Scenario, draw
from .store import KEYS, Store

if TYPE_CHECKING:
    from .faults import Faults


@dataclass
class Seatholder:
    """A node as its operator knows it: an id on a machine, with one agent after the other."""

    cluster: Cluster
    node_id: str
    machine: Machine
    may_restart: bool = True
    wanted: bool = True
    """Whether its operator wants it to take part (not drained)."""
    impostor: bool = False
    lives: int = 0
    agent: Agent | None = None
    past: list[Agent] = field(default_factory=list)
    incarnations: list[str] = field(default_factory=list)
    failing_starts: int = 0
    hanging_starts: int = 0
    unkillable_stops: int = 0
    hanging_stops: int = 0
    portless: bool = False
    """It has no port for a bootstrap store."""
    parking_s: float | None = None
    """How long its workers take to park the next time, if not as long as usual."""

    @property
    def mark(self) -> str:
        """Tells a second agent with the same node id apart."""
        return "'" if self.impostor else ""

    def slots(self) -> int:
        """Return how many workers it offers for the next generation."""
        return self.cluster.kernel.random.randint(1, 4)

    def fails_at_start(self) -> bool:
        """Return whether this start fails."""
        self.failing_starts -= self.failing_starts > 0
        return self.failing_starts > 0

    @property
    def stop_hangs(self) -> bool:
        """Return whether its agent does not get on with a stop, or will not."""
        agent = self.agent
        return self.hanging_stops > 0 or (agent is not None and agent.process.alive and agent.stop_hangs)

    def hangs_at_stop(self) -> bool:
        """Return whether the agent does not get on with this stop, while its lease is renewed."""
        self.hanging_stops -= self.hanging_stops > 0
        return self.hanging_stops > 0

    def hangs_at_start(self) -> bool:
        """Return whether this start never ends."""
        self.hanging_starts -= self.hanging_starts > 0
        return self.hanging_starts > 0

    def parks_after_s(self) -> float:
        """How long its workers take to park; more than there is time for if they cannot."""
        takes_s, self.parking_s = self.parking_s, None
        return self.cluster.kernel.random.uniform(0.001, 0.05) if takes_s is None else takes_s

    def recover(self) -> None:
        """Have its next starts and stops go well."""
        self.failing_starts = self.hanging_starts = self.unkillable_stops = self.hanging_stops = 0


class Endpoint:
    """Where the store is dialled."""

    def __init__(self, cluster: Cluster, machine: Machine) -> None:
        self.cluster = cluster
        self.machine = machine
        self.store: Store | None = None
        self.host: Process | None = None
        self.lives = 0
        self.may_forget = False
        """Whether the first coordinator in a new store may know less of the run than the nodes."""
        self.may_remove = False
        """Whether the records of the run may be removed from a c10d store: all agents have departed."""

    @property
    def serving(self) -> bool:
        """Return whether there is a store."""
        return self.host is not None and self.host.alive

    def connect(self, agent: Agent) -> Connection | None:
        """Dial; the agent of the endpoint's machine becomes the host if there is none."""
        if not self.serving and self._may_host(agent):
            self.open(agent.process)
        if not self.serving or self.store is None:
            return None
        if self.cluster.over and isinstance(self.store, Etcd):
            return None  # nothing is there any more that belongs to the run
        connection = self.store.connect(agent.machine)
        if isinstance(connection, EtcdConnection) and agent.election is not None:
            connection.saw = partial(agent.election.saw, self.store.store_id)
        return connection

    def _may_host(self, agent: Agent) -> bool:
        return (
            self.cluster.scenario.hosting == "agent"
            and agent.machine is self.machine
            and agent.outcome is None
            and not self.cluster.over
        )

    def open(self, process: Process) -> None:
        """A new, empty store in this process, with a coordinator beside it unless it is elected."""
        self.lives += 1
        self.host = process
        in_etcd = self.cluster.scenario.hosting == "etcd"
        kind = Etcd if in_etcd else Store
        self.store = kind(
            f"store{self.lives}", self.machine, process, self.cluster.network, self.cluster.checker
        )
        self.store.hint_loss = self.cluster.scenario.hint_loss
        known, kept = self.cluster.checker.newest_history, self.machine.disk
        knows_less = not in_etcd and known is not None and (kept is None or kept.rank < known.rank)
        if knows_less and (kept is None or self.machine.disk_is_behind):
            self.may_forget = True  # its disk was lost, or full
        self.cluster.checker.store_opened()
        self.cluster.story(process.name, "hosts {}", self.store.store_id)
        if not in_etcd:
            HostedCoordinator(self.cluster, self.machine, process, self.store)


class Cluster:
    """Everything, under one seed."""

    def __init__(
        self,
        seed: int,
        focus: Collection[str] = (),
        *,
        hosting: str | None = None,
        tell: bool = False,
        scenario: Scenario | None = None,
    ) -> None:
        """Begin.

        Args:
            seed: of all that is drawn.
            focus: the only kinds of faults; none: drawn.
            hosting: where the store lives (see :class:`Scenario`); None: as the seed says.
            tell: whether to record the story.
            scenario: with one, nothing is drawn: every choice is the middle one.
        """
        self.seed = seed
        self.kernel = Kernel(seed, None if scenario is None else Middle())
        self.scenario = scenario or self._draw(focus, hosting)
        self.policy: Policy = self.scenario.policy
        self.network = Network(self.kernel, self.scenario.latency_s)
        self.told: list[tuple[float, str, str]] | None = [] if tell else None
        self.checker = Checker(self)
        self.job = Job(self)
        self.calm = False
        """Whether the faults are over."""
        self.over = False
        """Whether a coordinator said that every agent knows the outcome."""
        self.armed: tuple[str, str] | None = None
        """Where a coordinator's process is to ``freeze`` or to ``die`` (see :meth:`strikes_at`)."""
        self.traps: list[tuple[str, Any, Seatholder | None]] = []
        """(point in an agent's life, what goes wrong when the next agent gets there, which node's if not any)."""
        self.faults: Faults | None = None
        self.unreachable: set[tuple[str, str]] = set()
        """(machine, node whose bootstrap store it cannot reach)."""
        self.holders: list[Seatholder] = []
        self.agents: dict[str, Agent] = {}
        """Incarnation → its agent."""
        self.gone: list[Agent] = []
        self.began_again_s = 0.0
        """When the operator started everything once more."""
        self.told_to_leave: set[str] = set()
        """Nodes that were asked to leave."""
        self.ongoing = 0
        """Faults that last and are not undone yet."""
        self.stop_hung_s = 0.0
        """Until when an agent last did not get on with a stop."""
        self.troubled_s = 0.0
        """When anything last went wrong, was put right, or was started."""
        self.offers: dict[Address, Offer] = {}
        """All that ever were."""
        self._incarnations = 0
        self._build()

    def _draw(self, focus: Collection[str], hosting: str | None) -> Scenario:
        hosting = hosting or ("etcd" if self.seed % 3 == 2 else None)
        return draw(self.kernel.random, focus, hosting)

    def _build(self) -> None:
        first = Machine(self.kernel, "m0", self.scenario.max_skew)
        self.machines = [first]
        endpoint_machine = first
        if self.scenario.hosting != "agent":
            endpoint_machine = Machine(self.kernel, "store", self.scenario.max_skew)
        self.endpoint = Endpoint(self, endpoint_machine)
        for index in range(self.scenario.nodes):
            self.add_node(self.machine_for(index), f"n{index}")
        if self.scenario.hosting != "agent":
            self.serve()

    def machine_for(self, index: int) -> Machine:
        """The machine of the node with this index."""
        if index == 0 or (index == 1 and self.scenario.housemates):
            return self.machines[0]
        machine = Machine(self.kernel, f"m{index}", self.scenario.max_skew)
        self.machines.append(machine)
        return machine

    def add_node(self, machine: Machine, node_id: str, **how: Any) -> Seatholder:
        """A node whose agent starts soon."""
        holder = Seatholder(self, node_id, machine, **how)
        self.holders.append(holder)
        self.kernel.after(
            self.kernel.random.choice((0.0, 0.3, 2.0)) * self.kernel.random.random(), self.start, holder
        )
        return holder

    def serve(self) -> None:
        """Start a process that hosts the store outside any agent."""
        if not self.endpoint.serving and not self.over:
            self.trouble()
            self.endpoint.open(self.endpoint.machine.process("serve"))

    # -- agents ---------------------------------------------------------------------------------

    def new_incarnation(self, holder: Seatholder) -> str:
        """A fresh name."""
        self._incarnations += 1
        name = f"{holder.node_id}-i{self._incarnations}"
        holder.incarnations.append(name)
        return name

    def policy_for(self, holder: Seatholder) -> Policy:
        """Return what this agent is started with: perhaps a shorter lease, unless it is of those that begin the run."""
        share = self.scenario.least_lease
        if share == 1.0 or (holder.lives == 1 and self.holders.index(holder) < self.scenario.nodes):
            return self.policy
        ttl_s = self.policy.lease_ttl_s * self.kernel.random.choice((1.0, share))
        return msgspec.structs.replace(self.policy, lease_ttl_s=max(ttl_s, SHORTEST_LEASE_S))

    def embodied(self, agent: Agent) -> None:
        """This agent lives under the name it has now."""
        self.agents[agent.incarnation] = agent

    def start(self, holder: Seatholder) -> None:
        """The operator, systemd or Slurm starts the agent of this node."""
        if not holder.machine.up or (holder.agent is not None and holder.agent.process.alive) or self.over:
            return
        if not any(known is holder for known in self.holders):
            return  # it is not started again with the others (see begin_again)
        self.trouble()
        workers_gone = not any(group.agent.holder is holder for group in self.checker.live)
        proven = workers_gone and self.kernel.random.random() < 0.5
        replaces = tuple(holder.incarnations) if proven else ()
        holder.lives += 1
        holder.agent = agent = Agent(self, holder, replaces)
        holder.past.append(agent)
        self.story(agent.name, "starts{}", " with proof that its old workers are gone" if replaces else "")

    def crash_agent(self, holder: Seatholder, restart_after_s: float | None) -> None:
        """SIGKILL the agent."""
        agent = holder.agent
        self.trouble()
        if agent is not None and agent.process.alive:
            self.story(agent.name, "is killed")
            if agent.machine.paused:  # the signal is delivered at the thaw
                agent.process.do(agent.process.kill)
            else:
                agent.process.kill()
        if restart_after_s is not None:
            self.kernel.after(restart_after_s, self.start, holder)

    def serves(self, agent: Agent) -> bool:
        """Return whether this agent's process must go on: to host the store, or to remove the records of the run."""
        winding_up = agent.election is not None and agent.election.winding_up
        return winding_up or (self.endpoint.host is agent.process and not self.over)

    def departed(self, agent: Agent) -> None:
        """An agent's process ends by itself, its part being over."""
        self.gone.append(agent)
        assert agent.outcome is not None  # it departed
        if self.scenario.requeued and agent.outcome.outcome is Outcome.STOPPED and agent.holder.wanted:
            wait_s = self.kernel.random.choice((0.1, 3.0)) * self.kernel.random.random()
            self.kernel.after(wait_s, self.start, agent.holder)

    def may_go_on(self, plan: Plan) -> bool:
        """Return whether an agent is about to join a stopped run whose coordinator does not wait to depart."""
        present = any(
            holder.agent and holder.agent.process.alive and not holder.agent.outcome
            for holder in self.holders
        )
        return plan.phase is Phase.STOPPED and self.scenario.hosting == "serve" and present

    def run_over(self, coordination: Coordination) -> None:
        """A coordinator has nothing left to do."""
        self.story(coordination.name, "is done")
        self.over = True

    @property
    def goes_on_here(self) -> bool:
        """Return whether everything is started once more in the store in which the run has ended."""
        hosting, again = self.scenario.hosting, self.scenario.again and not self.checker.forgot
        return again and (hosting == "etcd" or (hosting == "serve" and self.scenario.same_store))

    @property
    def is_removed(self) -> bool:
        """Return whether the store holds nothing of the run any more but how it ended."""
        store = self.endpoint.store
        kept = (KEYS.ended, KEYS.reports)
        return store is not None and not any(not key.startswith(kept) for key in store.values)

    def begin_again(self) -> None:
        """After the run: the operator starts everything once more, under the same name."""
        self.story("operator", "starts everything again")
        if self.endpoint.host is not None and not self.goes_on_here:
            self.endpoint.host.kill()
        self.over = self.endpoint.may_remove = False
        self.gone.clear()
        self.began_again_s = self.kernel.now
        self.checker.begin_again()
        for machine in self.machines:
            machine.boot()
        self.holders = [holder for holder in self.holders if not holder.impostor]
        for holder in self.holders:
            holder.wanted, holder.portless = True, False
            holder.recover()
            self.kernel.after(self.kernel.random.random(), self.start, holder)
        self.unreachable.clear()
        if self.scenario.hosting == "serve":
            self.serve()

    # -- workers --------------------------------------------------------------------------------

    def worker_born(self, group: Group) -> None:
        """Workers were started."""
        holder = group.agent.holder
        if holder.unkillable_stops:
            holder.unkillable_stops -= 1
            group.unkillable = True
        self.story(group.agent.name, "starts the workers of generation {}", group.generation)
        self.checker.worker_born(group)
        self.job.born(group)

    def worker_ended(self, group: Group, how: str) -> None:
        """Workers are gone."""
        self.story(group.agent.name, "workers of generation {} ended: {}", group.generation, how)
        self.checker.worker_ended(group)
        self.job.ended(group)

    def offer(self, holder: Seatholder, process: Process) -> Offer:
        """A process of this node serves a fresh bootstrap store."""
        address = Address(holder.machine.name, 2000 + len(self.offers) % 60000)
        self.offers[address] = offer = Offer(address, holder.node_id, process)
        return offer

    def bootstrap_reachable(self, machine: Machine, address: Address) -> bool:
        """Return whether this machine reaches the bootstrap store at this address."""
        pair = machine.name, self.offers[address].node_id
        return self.is_served(address) and pair not in self.unreachable

    def is_served(self, address: Address) -> bool:
        """Return whether there is a bootstrap store at this address."""
        offer = self.offers[address]
        return offer.open and offer.process.alive

    # -- durations ------------------------------------------------------------------------------

    def call_s(self) -> float:
        """Return how long a lane waits for the store's answer."""
        return self.policy.lease_ttl_s * self.scenario.patience

    def watch_s(self) -> float:
        """Return how long one blocking wait for the leader key to vanish lasts."""
        return self.policy.lease_ttl_s / 2

    def kill_takes_s(self) -> float:
        """From SIGKILL to the end of the last process."""
        if self.scenario.slow_kills:
            return self.scenario.kill_max_s
        return self.scenario.kill_max_s * self.kernel.random.choice(
            (0.1, self.kernel.random.random(), 1.0, 1.0)
        )

    def grace_s(self, grace: Grace) -> float:
        """From SIGTERM to SIGKILL."""
        of = {
            Grace.NONE: 0.0,
            Grace.RESTART: self.scenario.restart_grace_s,
            Grace.DRAIN: self.scenario.drain_grace_s,
        }
        return of[grace]

    def reacts_to_sigterm_s(self) -> float:
        """Return how long workers take to end by themselves after SIGTERM."""
        if self.scenario.prompt_workers:
            return 0.01
        return self.kernel.random.choice((0.01, 0.1, 1.0, 100.0)) * self.kernel.random.random()

    def warm_up_takes_s(self) -> float:
        """How long workers that are started apart from any world take to park."""
        return self.scenario.warm_up_s * self.kernel.random.uniform(0.1, 1.0)

    def stop_takes_s(self) -> float:
        """The stop deadline an agent announces."""
        return self.scenario.stop_s

    def looks_after_s(self) -> float:
        """Return how long workers run until they begin to look at notices."""
        return self.scenario.looks_after_s * self.kernel.random.random()

    def save_takes_s(self) -> float:
        """Return how long it takes all ranks to save."""
        return self.scenario.save_s * self.kernel.random.uniform(0.2, 1.0)

    def work_s(self) -> float:
        """Return how long a world runs until its work is done."""
        if self.calm and self.scenario.last_ask is not None and self.checker.notices.stopped is None:
            return self.kernel.random.uniform(8.0, 14.0)  # time to ask while it runs
        if self.calm:
            return self.kernel.random.uniform(0.5, 1.5)
        return self.scenario.work_s * self.kernel.random.uniform(0.5, 1.5)

    # -- truths for the checker -----------------------------------------------------------------

    def strikes_at(self, point: str, process: Process) -> bool:
        """A coordinator comes to a call, or to the next request of one; whether its process stops just there."""
        if self.armed is None or self.armed[0] != point or self.faults is None:
            return False
        if point == "store request" and self.kernel.random.random() > 0.6:
            return False  # a later one
        what, self.armed = self.armed[1], None
        self.story(process.name, "is to {} just at: {}", what, point)
        if what == "freeze":
            self.faults.freeze(process)
        else:
            self._kill_coordinator(process)
        return True

    def _kill_coordinator(self, process: Process) -> None:
        self.trouble()
        process.kill()
        restart_s = self.kernel.random.choice((0.1, 1.0, 6.0))
        if process.name == "serve":
            self.kernel.after(restart_s, self.serve)
        for holder in self.holders:
            if holder.agent is not None and holder.agent.process is process:
                holder.wanted = True
                self.kernel.after(restart_s, self.start, holder)

    def at(self, point: str, agent: Agent | None) -> None:
        """An agent gets to a point in its life, or (None) a coordinator to a call of this name."""
        holder = agent.holder if agent is not None else None
        for trap in self.traps:
            if trap[0] == point and trap[2] in (None, holder) and self.faults is not None:
                self.traps.remove(trap)
                self.faults.spring(trap[1], holder)
                return

    def healthy(self) -> list[Seatholder]:
        """Nodes that could take part now, as far as an observer can tell."""
        return [
            holder
            for holder in self.holders
            if holder.wanted
            and not holder.stop_hangs
            and not holder.impostor
            and holder.agent is not None
            and holder.agent.process.alive
            and not holder.agent.process.frozen
            and holder.agent.outcome is None
        ]

    def enough_healthy(self, but: int = 0) -> bool:
        """Return whether the nodes that are well make a world that is allowed, ``but`` so many of them."""
        return self.policy.fit(len(self.healthy()) - but) > 0

    def has_host(self) -> bool:
        """Return whether a store is there, or a node that is well is on the machine that would host it."""
        machines = [holder.machine for holder in self.healthy()]
        return self.endpoint.serving or self.endpoint.machine in machines

    # -- how long all has been well -------------------------------------------------------------

    def trouble(self) -> None:
        """Something goes wrong now, or is put right."""
        self.troubled_s = self.kernel.now

    def stop_hung(self) -> None:
        """An agent gets on with a stop after it did not for long."""
        self.trouble()
        self.stop_hung_s = self.kernel.now

    def well_for_s(self) -> float:
        """Return for how long nothing has gone wrong, and nothing is about to; 0 if that cannot be told."""
        lurking = self.traps or self.armed or self.unreachable or self.network.loss
        hampered = any(
            holder.failing_starts
            or holder.hanging_starts
            or holder.unkillable_stops
            or holder.stop_hangs
            or holder.impostor
            for holder in self.holders
        )
        if self.ongoing or lurking or hampered or not self.endpoint.serving or self.network.stray:
            return 0.0
        return self.kernel.now - self.troubled_s

    def check_too_few(self, plan: Plan) -> None:
        """A run that fails for want of nodes must really lack them."""
        calm_for_s = self.kernel.now - self.scenario.quiet_s
        if calm_for_s > self.scenario.bound_s and self.enough_healthy():
            self.checker.broken("liveness", f"{len(self.healthy())} nodes are well, yet: {plan.reason}")

    def check_refusal(self, incarnation: str, refusal: Refusal) -> None:
        """Only a second agent with the id of a living one may be refused, or one that comes with a longer lease."""
        agent = self.agents.get(incarnation)
        if agent is None:
            return
        why = refusal.why
        if not refusal.is_node_id_held:
            group = agent.guard.group
            trained = group is not None and group.born_s > self.checker.ended_s  # in this life of the run
            self.checker.require(
                not trained or self.checker.forgot,
                "no node is refused that has trained",
                f"{agent.name}: {why}",
            )
            return
        others = [
            other
            for holder in self.holders
            if holder.node_id == agent.holder.node_id
            for other in holder.past
            if other is not agent
        ]
        if not any(other.died_s is None or other.died_s > agent.began_s for other in others):
            self.checker.broken("only a second agent is refused", f"{agent.name}: {why}")

    def story(self, who: str, text: str, *details: Any) -> None:
        """Record this if the story was requested."""
        if self.told is not None:
            self.told.append((self.kernel.now, who, text.format(*details)))

    def reports_invalid(self, who: str) -> Callable[[str], None]:
        """Return what is told of invalid records that someone reads."""
        return lambda problem: self.story(who, "reads what is no record: {}", problem)

    def all_gone(self) -> bool:
        """Return whether no agent is left."""
        return self.over and not any(
            holder.agent is not None and holder.agent.process.alive for holder in self.holders
        )

    def outcome_expected(self, agent: Agent) -> bool:
        """Return whether this agent departed with what it should have departed with."""
        assert agent.outcome is not None  # it departed
        plans = [self.checker.final]
        if agent.began_s < self.began_again_s:
            plans.append(self.checker.earlier)
        verdicts = {plan.phase for plan in plans if plan is not None}
        outcome = agent.outcome.outcome
        if outcome is Outcome.FINISHED:
            return Phase.FINISHED in verdicts
        if outcome is Outcome.FAILED:
            return Phase.FAILED in verdicts
        if outcome is Outcome.STOPPED:
            return self.checker.notices.stopped is not None
        if outcome is Outcome.DRAINED:
            told = agent.holder.node_id in self.told_to_leave
            return agent.asked_to_leave or told
        return True
