"""The guard beside each agent, and the workers it parents.

The guard knows the lease's deadline from a cell it shares with the agent. It kills the workers at the
deadline, and when its agent dies; it launches none past the deadline. Killing takes a while, at most what
the fence margin leaves room for. Parked workers are its children as much as those that act.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elastic_agent.protocol.records import Notice, World

from .kernel import Inbox, Routine

if TYPE_CHECKING:
    from .agent import Agent
    from .cluster import Cluster


class Doing(enum.Enum):
    """What a worker does."""

    ACTS = "acts"
    PARKED = "parked"
    DEAD = "dead"


@dataclass(eq=False)
class Worker:
    """The process of one worker, over all generations in which it takes part."""

    slot: int
    incarnation: str
    """Of the node when it was started."""
    generation: int
    """In which it acts, or which it has left."""
    doing: Doing = Doing.ACTS


@dataclass
class Group:
    """One node's workers of one generation."""

    agent: Agent
    world: World
    born_s: float
    alive: bool = True
    """Whether user code may run."""
    unkillable: bool = False
    exited: str | None = None
    dying: bool = False
    started: bool = False
    stopped: bool = False
    """Its agent was answered that they are."""
    interrupted: bool = False
    """A signal has terminated one of them, and the others end soon."""
    handles_notices: bool = False
    """The workers look at notices by now."""
    notice: Notice | None = None
    """What was written where they look."""
    told_s: float = 0.0
    ends: list[Inbox] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generation = self.world.generation
        """The generation the workers belong to; looked at after every step."""


class Guard:
    """One guard process."""

    def __init__(self, cluster: Cluster, agent: Agent) -> None:
        self.cluster = cluster
        self.agent = agent
        self.machine = agent.machine
        self.process = self.machine.process(f"guard of {agent.name}")
        self.deadline_s = float("-inf")
        """By the machine's clock; before the first lease no worker may run."""
        self.group: Group | None = None
        self.parked: list[Worker] = []
        """Those that may go on in the next world."""
        self._parked_die = False
        self._changed = Inbox(cluster.kernel)
        self.process.spawn(self._watch())
        self.process.when_killed.append(self._gone)

    def agent_died(self) -> None:
        """The socket to the agent closed."""
        self.process.do(self._kill_all, "its agent died")
        self.process.do(self._changed.put, None)

    def extend(self, deadline_s: float) -> None:
        """The agent writes a later deadline into the shared cell."""
        self.deadline_s = deadline_s
        self._changed.put(None)

    def may_launch(self) -> bool:
        """Return whether the lease allows to start workers now."""
        return self.machine.clock() < self.deadline_s

    def launch(self, world: World) -> Group | None:
        """Start the workers of this world, or refuse."""
        if not self.may_launch():
            return None
        self.group = group = Group(self.agent, world, self.cluster.kernel.now)
        group.workers = self._seated(world)
        self.cluster.worker_born(group)
        self._changed.put(None)
        return group

    def warm_up(self, slots: int) -> bool:
        """Start the workers that are missing, apart from any world, or refuse; they park a little later."""
        if not self.may_launch():
            return False
        missing = set(range(slots)) - {worker.slot for worker in self.parked}
        incarnation = self.agent.incarnation
        self.parked += [Worker(slot, incarnation, 0, Doing.PARKED) for slot in sorted(missing)]
        self.cluster.checker.parking.parks(self.agent)
        self._changed.put(None)
        return True

    def _seated(self, world: World) -> list[Worker]:
        """Return the world's workers here: those that are parked go on, and others are started."""
        seat = world.seat_of(self.agent.incarnation)
        slots = seat.slots if seat is not None else 0
        parked, self.parked = {worker.slot: worker for worker in self.parked}, []
        workers = []
        for slot in range(slots):
            worker = parked.pop(slot, None)
            if worker is None:
                worker = Worker(slot, self.agent.incarnation, world.generation)
            else:
                self.cluster.checker.parking.goes_on(self.agent, worker, world)
            workers.append(worker)
        self.cluster.checker.parking.left_over(self.agent, list(parked.values()))
        return workers

    def park(self, group: Group) -> None:
        """The workers that have not ended leave their world and wait."""
        self.parked = [worker for worker in group.workers if worker.doing is Doing.ACTS]
        self.cluster.checker.parking.parks(self.agent)
        self.end(group, "parked")
        self._changed.put(None)

    def parked_ends(self) -> None:
        """A worker ends while it is parked."""
        if self.parked and not self._parked_die:
            self.parked.pop().doing = Doing.DEAD

    def kill_parked(self, why: str) -> None:
        """SIGKILL; they are gone a little later."""
        if self.parked and not self._parked_die:
            self._parked_die = True
            self.process.spawn(self._killing_parked(why))

    def _killing_parked(self, why: str) -> Routine:
        yield self.cluster.kill_takes_s()
        self._parked_gone(why)

    def _parked_gone(self, why: str) -> None:
        for worker in self.parked:
            worker.doing = Doing.DEAD
        if self.parked:
            self.cluster.story(self.agent.name, "parked workers are killed, {}", why)
        self.parked, self._parked_die = [], False
        self.agent.parked_gone.put(why)

    def end(self, group: Group, how: str) -> None:
        """The workers are gone, or parked; no user code runs any more."""
        if group.alive:
            group.alive = False
            for worker in group.workers:
                worker.doing = Doing.PARKED if worker in self.parked else Doing.DEAD
            group.exited = how
            self.cluster.worker_ended(group, how)
            for inbox in group.ends:
                inbox.put(how)

    def kill(self, group: Group, why: str) -> None:
        """SIGKILL; the workers are gone a little later."""
        if group.alive and not group.dying:
            group.dying = True
            self.process.spawn(self._killing(group, why))

    def _killing(self, group: Group, why: str) -> Routine:
        yield self.cluster.kill_takes_s()
        self.end(group, f"killed, {why}")

    def _kill_all(self, why: str) -> None:
        if self.group is not None:
            self.kill(self.group, why)
        self.kill_parked(why)

    def _gone(self) -> None:
        if self.group is not None:
            self.end(self.group, "its guard died")
        self._parked_gone("its guard died")

    def _watch(self) -> Routine:
        while True:
            group = self.group
            acts = group is not None and group.alive and not group.dying
            if not acts and (not self.parked or self._parked_die):
                yield self._changed, None
            elif self.machine.clock() >= self.deadline_s:
                self._kill_all("the lease ran out")
                self.agent.fenced("the guard killed the workers when the lease expired")
            else:
                # a hair later, so that rounding cannot make it wake just before the deadline
                yield self._changed, self.machine.real_s(self.deadline_s - self.machine.clock()) + 1e-9
