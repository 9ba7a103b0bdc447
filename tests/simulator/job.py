"""What the workers do: start, work together, fail together, finish."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elastic_agent.protocol.records import Failure, FailureKind

from .guard import Group
from .kernel import Routine

if TYPE_CHECKING:
    from .agent import Agent
    from .cluster import Cluster


@dataclass
class Generation:
    """The truth about one generation's workers."""

    groups: dict[str, Group] = field(default_factory=dict)
    succeeded: set[str] = field(default_factory=set)
    """Incarnations whose workers all exited with 0."""
    spoilt: bool = False
    """Workers of it died or failed; the others' collectives cannot end well."""
    failed: bool = False
    """A worker really failed or hung (for whatever reason) and its agent was there to see it."""
    finishing: bool = False


class Job:
    """The training job of the run."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.kernel = cluster.kernel
        self.generations: dict[int, Generation] = {}

    def of(self, number: int) -> Generation:
        """The truth about a generation."""
        return self.generations.setdefault(number, Generation())

    def starting(self, agent: Agent, group: Group) -> Routine:
        """Start the workers of one node: a task of its agent."""
        holder = agent.holder
        yield self.kernel.random.uniform(0.02, 0.2)
        if holder.hangs_at_start():
            self.cluster.story(agent.name, "hangs while starting generation {}", group.generation)
            return
        if not group.alive:
            return
        if holder.fails_at_start():
            agent.guard.end(group, "could not start")
            failure = Failure(FailureKind.START, f"{holder.node_id}: no such file")
            agent.group_exited(group, failure)
            return
        group.started = True
        agent.post_always(lambda: agent.node.started(group.generation))
        self._maybe_finish(self.of(group.generation))

    def born(self, group: Group) -> None:
        """Workers exist."""
        self.of(group.generation).groups[group.agent.incarnation] = group

    def ended(self, group: Group) -> None:
        """Workers are gone; if not by success, those of other nodes notice sooner or later."""
        generation = self.of(group.generation)
        if group.exited == "success":
            return
        generation.spoilt = True
        for other in generation.groups.values():
            if other.alive and self.kernel.random.random() < 0.8:
                delay_s = self.kernel.random.choice((0.01, 0.1, 2.0)) * self.kernel.random.random()
                failure = Failure(FailureKind.WORKER, f"{other.agent.name}: connection closed by peer")
                self.kernel.after(delay_s, other.agent.guard.process.do, self.fail, other, failure)

    def fail(self, group: Group, failure: Failure) -> None:
        """A worker fails; its agent takes the others of the node down and reports it."""
        if not group.alive or group.dying or not group.agent.process.alive:
            return
        self.cluster.story(group.agent.name, "generation {}: {}", group.generation, failure.summary)
        self.of(group.generation).failed = True
        if failure.kind is FailureKind.WORKER:
            group.agent.guard.end(group, "failed")
        group.agent.group_exited(group, failure)

    def succeed(self, group: Group) -> None:
        """All workers of the node exit with 0."""
        if group.alive and not group.dying and group.started:
            self.of(group.generation).succeeded.add(group.agent.incarnation)
            group.agent.guard.end(group, "success")
            group.agent.group_exited(group, None)

    def hurry(self) -> None:
        """No more faults: whatever runs finishes soon."""
        for generation in self.generations.values():
            generation.finishing = False
            self._maybe_finish(generation)

    def _maybe_finish(self, generation: Generation) -> None:
        groups = list(generation.groups.values())
        seats = len(groups[0].world.seats) if groups else 0
        everybody = len(groups) == seats and all(one.started for one in groups)
        if not groups or not everybody or generation.finishing or generation.spoilt:
            return
        generation.finishing = True
        work_s = self.cluster.work_s()
        for group in groups:
            self.kernel.after(
                work_s + self.kernel.random.uniform(0.0, 0.5),
                group.agent.guard.process.do,
                self._finish,
                generation,
                group,
            )

    def _finish(self, generation: Generation, group: Group) -> None:
        if not generation.spoilt:
            self.succeed(group)
