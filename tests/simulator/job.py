"""What the workers do: start, work together, fail together, finish; and, where they heed notices, save and leave.

Training is a number of steps, counted only while the whole world works. A checkpoint is a number too, kept outside of
machines; workers that begin to train begin there. All ranks of a world look at notices in the same step, so that
nothing is saved before all of them have begun to look, and then all save and leave together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from elastic_agent.protocol.records import Failure, FailureKind, Notice

from .guard import Doing, Group
from .kernel import Routine

if TYPE_CHECKING:
    from .agent import Agent
    from .cluster import Cluster


STEP_S = 0.1
LOOK_AGAIN_S = 0.1
BROKEN_S = 1.0
"""How long workers that can park wait for a plan when their world is broken, before they are said to have failed."""


@dataclass
class Generation:
    """The truth about one generation's workers."""

    groups: dict[str, Group] = field(default_factory=dict)
    succeeded: set[str] = field(default_factory=set)
    """Incarnations whose workers all exited with 0."""
    spoilt: bool = False
    """Workers of it died or failed; the others' collectives cannot end well."""
    failures: list[Failure] = field(default_factory=list)
    """Of workers that really failed or hung (for whatever reason), while their agents were there to see it."""
    finishing: bool = False
    began_s: float | None = None
    """When the whole world began to train."""
    ended_s: float | None = None
    """When the first workers of it ended."""
    base: int = 0
    """The step it began at."""
    trained: int | None = None
    """The step it got to, once it does not train any more."""
    agreed: bool = False
    """Its workers are going to save and leave."""
    saving: bool = False
    saved: int | None = None
    """The step at which they saved before they left."""

    @property
    def failed(self) -> bool:
        """Return whether a worker failed or hung."""
        return bool(self.failures)

    @property
    def complete(self) -> bool:
        """Return whether the whole world was started."""
        groups = self.groups.values()
        seats = len(next(iter(groups)).world.seats) if groups else 0
        return seats > 0 and len(groups) == seats and all(group.started for group in groups)

    @property
    def all_left(self) -> bool:
        """Return whether all saved and left, with none lost, failed or stopped over it."""
        ends = [group.exited for group in self.groups.values()]
        saved = self.complete and self.saved is not None and not self.failed
        return saved and set(ends) <= {"left", "success"}

    def step_at(self, now_s: float) -> int:
        """Return how far it is trained."""
        if self.trained is not None or self.began_s is None:
            return self.base if self.trained is None else self.trained
        return self.base + int((now_s - self.began_s) / STEP_S)


class Job:
    """The training job of the run."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.kernel = cluster.kernel
        self.generations: dict[int, Generation] = {}
        self.checkpoint = 0
        """The step that was saved last; outside of all machines."""
        self.handles_notices = cluster.scenario.handles_notices
        self.peers_notice = True
        """Whether workers fail when workers of other nodes are gone."""
        self.broken = ""
        """The signature of the error with which every worker fails soon after its start, if any."""

    def of(self, number: int) -> Generation:
        """The truth about a generation."""
        return self.generations.setdefault(number, Generation())

    def _counts(self, group: Group) -> bool:
        """Return whether it is of the generation that has this number now; see :attr:`Checker.forgot`."""
        return self.of(group.generation).groups.get(group.agent.incarnation) is group

    def starting(self, agent: Agent, group: Group) -> Routine:
        """Start the workers of one node: a task of its agent."""
        holder = agent.holder
        yield self.kernel.random.uniform(0.02, 0.2)
        if holder.hangs_at_start():
            self.cluster.story(agent.name, "hangs while starting generation {}", group.generation)
            return
        if not group.alive:
            return
        alone = not self.cluster.is_served(group.world.bootstrap)
        if alone:
            self.cluster.checker.misses_bootstrap_store(group.world)
        if holder.fails_at_start() or alone:
            agent.guard.end(group, "could not start")
            what = "no bootstrap store" if alone else "no such file"
            failure = Failure(FailureKind.START, f"{holder.node_id}: {what}")
            agent.group_exited(group, failure)
            return
        group.started = True
        agent.post(lambda: agent.node.started(group.generation))
        self._maybe_train(self.of(group.generation), group.generation)
        self._maybe_finish(self.of(group.generation))
        if self.broken:
            self.kernel.after(self.kernel.random.uniform(0.0, 0.5), agent.guard.process.do, self._trip, group)
        if self.handles_notices:
            self.kernel.after(self.cluster.looks_after_s(), agent.guard.process.do, self._look, group)

    def born(self, group: Group) -> None:
        """Workers exist."""
        self.of(group.generation).groups[group.agent.incarnation] = group

    def ended(self, group: Group) -> None:
        """Workers are gone; if not by success, those of other nodes notice sooner or later."""
        if not self._counts(group):
            return
        generation = self.of(group.generation)
        generation.trained = generation.step_at(self.kernel.now)
        if generation.ended_s is None:
            generation.ended_s = self.kernel.now
        if group.exited in ("success", "left"):
            return
        generation.spoilt = True
        for other in generation.groups.values():
            if self.peers_notice and other.alive and self.kernel.random.random() < 0.8:
                delay_s = self.kernel.random.choice((0.01, 0.1, 2.0)) * self.kernel.random.random()
                failure = Failure(FailureKind.WORKER, f"{other.agent.name}: connection closed by peer")
                if self.cluster.scenario.survives:
                    delay_s += BROKEN_S
                self.kernel.after(delay_s, other.agent.guard.process.do, self.fail, other, failure)

    def fail(self, group: Group, failure: Failure) -> None:
        """A worker fails; its agent takes the others of the node down and reports it.

        Where workers can park, that is one worker, and the agent decides about the others.
        """
        if not group.alive or group.dying or not group.agent.process.alive:
            return
        self.cluster.story(group.agent.name, "generation {}: {}", group.generation, failure.summary)
        generation = self.of(group.generation)
        beaten = self.cluster.scenario.beats and generation.step_at(self.kernel.now) > generation.base
        failure = msgspec.structs.replace(failure, progressed=beaten)
        if self._counts(group):
            generation.failures.append(failure)
        if failure.kind is FailureKind.WORKER and self.cluster.scenario.survives:
            generation.spoilt |= self._counts(group)
            group.workers[-1].doing = Doing.DEAD
        elif failure.kind is FailureKind.WORKER:
            group.agent.guard.end(group, "failed")
        group.agent.group_exited(group, failure)

    def interrupt(self, group: Group) -> None:
        """A signal that the agent receives, too, terminates a worker of the node, and soon its others."""
        if not group.alive or group.dying or not group.started:
            return
        agent, group.interrupted = group.agent, True
        failure = Failure(FailureKind.INTERRUPTED, f"{agent.name}: a worker was terminated by SIGTERM")
        self.of(group.generation).spoilt = True
        agent.told(group, lambda: agent.node.interrupted(group.generation, failure))
        later_s = self.kernel.random.choice((0.0, 0.3, 2.0)) * self.kernel.random.random()
        self.kernel.after(later_s, agent.guard.process.do, self._all_interrupted, group)

    def _all_interrupted(self, group: Group) -> None:
        if group.alive and not group.dying:
            group.agent.guard.end(group, "interrupted")
            group.agent.group_left(group)

    def _trip(self, group: Group) -> None:
        """A worker gets to where the script is broken."""
        if self.broken:
            self.fail(
                group, Failure(FailureKind.WORKER, f"{group.agent.name}: a typo", signature=self.broken)
            )

    def succeed(self, group: Group) -> None:
        """All workers of the node exit with 0."""
        if group.alive and not group.dying and group.started and not group.interrupted:
            self.of(group.generation).succeeded.add(group.agent.incarnation)
            group.agent.guard.end(group, "success")
            group.agent.group_exited(group, None)

    def hurry(self) -> None:
        """No more faults: whatever runs finishes soon."""
        for generation in self.generations.values():
            generation.finishing = False
            self._maybe_finish(generation)

    def _maybe_finish(self, generation: Generation) -> None:
        if not generation.complete or generation.finishing or generation.spoilt:
            return
        generation.finishing = True
        work_s = self.cluster.work_s()
        for group in generation.groups.values():
            self.kernel.after(
                work_s + self.kernel.random.uniform(0.0, 0.5),
                group.agent.guard.process.do,
                self._finish,
                generation,
                group,
            )

    def _finish(self, generation: Generation, group: Group) -> None:
        if not generation.spoilt and not generation.saving:
            self.succeed(group)

    # -- notices --------------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """Another run, under the same name: from the first step."""
        self.generations.clear()
        self.checkpoint = 0

    def _maybe_train(self, generation: Generation, number: int) -> None:
        if generation.complete and generation.began_s is None and not generation.spoilt:
            generation.began_s, generation.base = self.kernel.now, self.checkpoint
            self.cluster.checker.notices.trains(number)

    def told(self, group: Group, notice: Notice) -> None:
        """A notice was written where these workers look, if they do."""
        group.notice, group.told_s = notice, self.kernel.now
        if group.handles_notices:
            self._agree(group)

    def _look(self, group: Group) -> None:
        """The workers begin to look at notices."""
        if not group.alive or group.dying:
            return
        group.handles_notices = True
        agent = group.agent
        agent.told(group, lambda: agent.node.handles_notices(group.generation))
        if group.notice is not None:
            self._agree(group)

    def _agree(self, group: Group) -> None:
        """One rank has seen the notice: with the next step all know of it."""
        generation = self.of(group.generation)
        if not generation.agreed and self._counts(group):
            generation.agreed = True
            self.kernel.after(STEP_S * self.kernel.random.uniform(1.0, 3.0), self._save, generation)

    def _save(self, generation: Generation) -> None:
        """Begin to save as soon as all ranks are at the same step, and look."""
        working = [group for group in generation.groups.values() if group.exited != "success"]
        if generation.spoilt or not any(group.alive for group in working):
            return
        if not generation.complete or not all(
            group.handles_notices and self._moves(group) for group in working
        ):
            self.kernel.after(LOOK_AGAIN_S, self._save, generation)
            return
        generation.saving = True
        generation.trained = generation.step_at(self.kernel.now)
        self.kernel.after(self.cluster.save_takes_s(), self._saved, generation)

    @staticmethod
    def _moves(group: Group) -> bool:
        return not group.agent.guard.process.frozen

    def _saved(self, generation: Generation) -> None:
        """Only what all have written is a checkpoint; then all leave."""
        working = [group for group in generation.groups.values() if group.exited != "success"]
        if generation.spoilt or not all(group.alive for group in working):
            return
        if not all(self._moves(group) for group in working):
            self.kernel.after(LOOK_AGAIN_S, self._saved, generation)
            return
        assert generation.trained is not None  # since it began to save
        generation.saved = self.checkpoint = generation.trained
        self.cluster.story("job", "saved at step {}", generation.saved)
        for group in working:
            delay_s = self.kernel.random.choice((0.0, 0.3)) * self.kernel.random.random()
            self.kernel.after(delay_s, group.agent.guard.process.do, self._leave, group)

    def _leave(self, group: Group) -> None:
        if group.alive and not group.dying:
            group.agent.guard.end(group, "left")
            group.agent.group_left(group)
