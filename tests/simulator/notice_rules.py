"""The rules of stop notices, held against the truth.

Most hold whatever goes wrong. Those that promise *when* something happens hold while all is well (see
``Cluster.well_for_s``): a notice reaches no node through a store that is down, and while worlds fall apart for other
reasons there are no workers to give it to. By store loss what was heard is forgotten. A rule that does not hold then
says so where it is conditioned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from elastic_agent.protocol.node import Depart, Outcome
from elastic_agent.protocol.notices import PROMPT
from elastic_agent.protocol.records import (
    Cause,
    Lease,
    Member,
    Notice,
    Phase,
    Plan,
    State,
    StopRequest,
    World,
)
from elastic_agent.rendezvous.participant import ANSWER_PATIENCE_S

from .guard import Group

if TYPE_CHECKING:
    from .agent import Agent
    from .checker import Checker
    from .cluster import Cluster
    from .store import Store

Seen = dict[str, tuple[Member, Lease]]
EPSILON_S = 1e-6
UNWELL_S = 4.0
"""How long after the last fault its consequences (messages held back, say) are not over yet."""


class NoticeRules:
    """What was asked for, who was told, and what became of it."""

    def __init__(self, cluster: Cluster, checker: Checker) -> None:
        self.cluster = cluster
        self.checker = checker
        self.stopped: Plan | None = None
        """The newest plan by which the run was stopped."""
        self._stop_asked = False
        self._know: set[Agent] = set()
        """Agents that have read that the run was stopped."""
        self._told_the_end: set[Agent] = set()
        """Agents that have read that the run is to end."""
        self._newest_life = self._newest_generation = self._earlier_generations = 0
        """The life of the newest plan."""
        self._life = 0
        """How often the run was taken up again."""
        self._ends_asked: dict[tuple[Agent, int], int] = {}
        """(Agent, serial of its ask that the run ends) → in which life it was uttered."""
        self._heard: dict[tuple[str, str], int] = {}
        """(Store, incarnation) → the newest of its asks that was ever heard there."""
        self._since_s: dict[tuple[str, int], float] = {}
        """(Store, serial of a notice) → when it was published first."""
        self.left_at_once_s = -60.0
        """When an agent last left without asking."""
        self._ended_by_notice: set[int] = set()
        """Generations that were over when all had left."""

    def _require(self, true: bool, rule: str, what: str) -> None:
        self.checker.require(true or self.checker.forgot, f"notices: {rule}", what)

    def begin_again(self) -> None:
        """A run of the same name begins; an agent that slept through the end of this one takes part in that."""
        self._told_the_end.clear()
        self._earlier_generations = self._newest_generation
        self._since_s.clear()

    # -- every plan -----------------------------------------------------------------------------

    def published(self, store: Store, before: Plan | None, plan: Plan, seen: Seen) -> None:
        """A plan was written into a store."""
        if plan.version == 1:  # a new store, or one that was emptied: it knows of no earlier request
            self._heard = {key: serial for key, serial in self._heard.items() if key[0] != store.store_id}
        self._newest_life = max(self._newest_life, plan.life)
        self._newest_generation = max(self._newest_generation, plan.generation)
        if before is not None:
            fresh = self._freshly_heard(store, before, plan)
            self._given_for_a_reason(before, plan, fresh)
            if before.phase is Phase.STOPPED and plan.phase is Phase.FORMING:
                self._life += 1
                self._told_the_end.clear()  # resumed, by an agent that was started for that
            if before.phase is not Phase.STOPPED:
                self._carried(before, plan)
                self._leavers_are_kept_in_mind(before, plan, seen)
            self._have_exited(before, plan)
        if plan.notice is not None:
            key = store.store_id, plan.notice.serial
            self._since_s.setdefault(key, self.cluster.kernel.now)
        if before is not None and before.phase is Phase.RUNNING:
            self._not_ended_too_soon(store, before, plan, seen)
        self._ends_with_its_nodes(before, plan, seen)
        if plan.phase is Phase.STOPPED:
            self._stopped(before, plan, seen)
        if plan.phase is Phase.RUNNING and (before is None or before.phase is not Phase.RUNNING):
            self._sealed(before, plan)
        elif plan.phase is Phase.RUNNING and plan.notice is not None:
            self._reaches_all(plan, plan.notice)

    def _freshly_heard(self, store: Store, before: Plan, plan: Plan) -> set[str]:
        """Return whose ask is heard with this plan: each once only."""
        fresh = {
            key for key, serial in plan.acknowledged.items() if before.acknowledged.get(key, 0) != serial
        }
        for incarnation in fresh:
            key, serial = (store.store_id, incarnation), plan.acknowledged[incarnation]
            known = self._heard.get(key, 0)
            self._require(
                serial > known, "a request is processed once", f"{incarnation}'s {serial} after {known}"
            )
            life = self._ends_asked.get((self.cluster.agents[incarnation], serial), self._life)
            why = f"{incarnation}'s {serial} of life {life} in life {self._life}"
            self._require(life == self._life, "requests of an earlier life are void", why)
            self._heard[key] = serial
        return fresh

    def _given_for_a_reason(self, before: Plan, plan: Plan, fresh: set[str]) -> None:
        told = plan.notice is not None and plan.notice.serial == plan.version
        grows = plan.notice is not None and plan.notice.cause is Cause.GROW
        asked = bool(fresh)
        self._require(
            not told or grows or asked, "no notice without a request", f"plan {plan.version}: {plan.notice}"
        )
        leaves = set(plan.leaving) - set(before.leaving)
        self._require(
            not leaves or asked, "no node leaves without a request", f"plan {plan.version}: {leaves}"
        )

    def _carried(self, before: Plan, plan: Plan) -> None:
        """That the run ends is not forgotten, whatever happens meanwhile."""
        if before.notice is None or not before.notice.ends or plan.is_terminal:
            return
        kept = plan.notice is not None and plan.notice.ends
        self._require(kept, "that the run ends is not forgotten", f"plan {plan.version}: {plan.reason}")

    def _leavers_are_kept_in_mind(self, before: Plan, plan: Plan, seen: Seen) -> None:
        for incarnation in set(before.leaving) - set(plan.leaving):
            member, lease = seen.get(incarnation, (None, None))
            gone = member is None or lease is None or lease.revoked
            left = member is not None and member.state is State.LEFT
            replaced = any(incarnation in member.replaces for member, _ in seen.values())
            self._require(gone or left or replaced, "a leaving node is not forgotten", incarnation)

    def _have_exited(self, before: Plan, plan: Plan) -> None:
        """Commands return by what a plan says of workers that have exited: then none of them runs."""
        gone = set(before.leaving) - set(plan.leaving) if before.phase is not Phase.STOPPED else set()
        if plan.phase is Phase.STOPPED and not plan.uncleared:
            gone |= {seat.incarnation for seat in before.uncleared}
        for generation in self.cluster.job.generations.values():
            for incarnation in gone & generation.groups.keys():
                group = generation.groups[incarnation]
                paused = group.agent.machine.paused or self.checker.being_killed_after_thaw(group)
                self._require(
                    paused or not group.alive,
                    "a command returns when the workers have exited",
                    group.agent.name,
                )

    # -- the end of a generation ----------------------------------------------------------------

    def _not_ended_too_soon(self, store: Store, before: Plan, plan: Plan, seen: Seen) -> None:
        """Workers have the time that they were told, unless something else ends their generation."""
        notice, world = before.notice, before.world
        ended = plan.phase in (Phase.FORMING, Phase.STOPPED)
        if notice is None or world is None or not ended or self._ended_otherwise(before, plan, seen):
            return
        states = [seen[seat.incarnation][0] for seat in world.seats if seat.incarnation in seen]
        own = [member for member in states if member.generation == before.generation]
        left = [member for member in own if member.state in (State.SAVED, State.SUCCEEDED)]
        done = {member.incarnation for member in left} | set(before.succeeded)
        if all(seat.incarnation in done for seat in world.seats):
            self._truly_left(before, world)
        elif notice.cause not in PROMPT or any(member.handles_notices for member in states):
            had_s = self.cluster.kernel.now - self._since_s[store.store_id, notice.serial]
            least_s = notice.left_s * (1.0 - 2.0 * self.cluster.scenario.max_skew) - EPSILON_S
            why = f"generation {before.generation} had {had_s:.3f} s of {notice.left_s:g} s"
            self._require(had_s >= least_s, "workers have the time of their notice", why)

    def _ended_otherwise(self, before: Plan, plan: Plan, seen: Seen) -> bool:
        """Return whether a failure, a loss or a later generation ended it, by what the coordinator knew."""
        assert before.world is not None  # the caller looked
        if plan.failure is not None or plan.generation > before.generation + 1:
            return True
        ends = before.notice is not None and before.notice.ends
        kept = set(before.succeeded)
        replaced = {old for member, _ in seen.values() for old in member.replaces}
        for seat in before.world.seats:
            if seat.incarnation in kept:
                continue
            if seat.incarnation not in seen or seat.incarnation in replaced:
                return True
            member, lease = seen[seat.incarnation]
            left = member.state in (State.SAVED, State.SUCCEEDED) and member.generation == before.generation
            if lease.revoked and not (left and ends):
                return True
            if member.state in (State.LEAVING, State.LEFT) or member.generation > before.generation:
                return True
        return False

    def _truly_left(self, before: Plan, world: World) -> None:
        """Check that all who say that they saved and left did, at one step, unless a signal has terminated some."""
        truth = self.cluster.job.of(before.generation)
        ends: set[str | None] = set()
        for seat in world.seats:
            group = truth.groups.get(seat.incarnation)
            how = group.exited if group is not None else None
            ends.add(how)
            self._require(
                how in ("left", "success", "interrupted"), "saved is true", f"{seat.node_id}: {how}"
            )
        if "interrupted" in ends:
            return
        self._require(truth.saved is not None, "saved is true", f"{before.generation} saved nothing")
        self._ended_by_notice.add(before.generation)

    def trains(self, number: int) -> None:
        """A world begins to train: if the one before left in good order, at the very step at which it did."""
        generations = self.cluster.job.generations
        earlier = [
            key for key, generation in generations.items() if key < number and generation.began_s is not None
        ]
        if not earlier:
            return
        previous, present = generations[max(earlier)], generations[number]
        if max(earlier) not in self._ended_by_notice:
            return  # what was trained since the last checkpoint is lost, and trained again
        same = previous.trained == previous.saved == present.base
        steps = f"{previous.trained} trained, {previous.saved} saved, goes on at {present.base}"
        self._require(same, "no step is lost, none trained twice", steps)

    # -- the next world -------------------------------------------------------------------------

    def _sealed(self, before: Plan | None, plan: Plan) -> None:
        world = plan.world
        assert world is not None  # it runs
        size, sizes = len(world.seats), plan.policy.node_counts
        allowed = not sizes or (size in sizes if len(sizes) > 1 else size % sizes[0] == 0)
        self._require(allowed, "only worlds of allowed sizes", f"{size} nodes")
        if before is None:
            return
        leavers = [seat.incarnation for seat in world.seats if seat.incarnation in before.leaving]
        self._require(not leavers, "a leaving node has no seat", f"{leavers}")
        if plan.notice is None or not plan.notice.ends:
            told = [
                seat.node_id
                for seat in world.seats
                if self.cluster.agents[seat.incarnation] in self._told_the_end
            ]
            self._require(not told, "that the run ends is not forgotten", f"{told} train on")
        if before.world is not None and plan.charged > before.charged:
            left = self.cluster.job.of(before.world.generation).all_left
            self._require(not left, "a notice is never charged", plan.reason)
        if plan.notice is not None:
            self._reaches_all(plan, plan.notice)

    # -- who is told ----------------------------------------------------------------------------

    def _reaches_all(self, plan: Plan, notice: Notice) -> None:
        """Soon all workers of this world have this notice, or a newer one."""
        assert plan.world is not None  # it runs
        kernel, cluster = self.cluster.kernel, self.cluster
        within_s = cluster.policy.lease_ttl_s + cluster.call_s() + 1.0  # a node waits a lease for a plan
        began_s = kernel.now

        def look() -> None:
            if cluster.well_for_s() < kernel.now - began_s + UNWELL_S or cluster.over:
                return
            for seat in plan.seats:
                group = cluster.job.of(plan.generation).groups.get(seat.incarnation)
                if group is not None and self._should_know(group, began_s):
                    known = group.notice.serial if group.notice is not None else 0
                    self._require(
                        known >= notice.serial, "notices are delivered in time", f"{seat.node_id}: {known}"
                    )

        kernel.after(within_s, look)

    @staticmethod
    def _should_know(group: Group, since_s: float) -> bool:
        agent = group.agent
        present = group.alive and not group.dying and agent.process.alive and not agent.process.frozen
        if agent.stopping:
            return False  # SIGTERM tells them more
        seat = group.world.seat_of(agent.incarnation)
        return present and seat is not None and group.born_s < since_s

    # -- the end of the run ---------------------------------------------------------------------

    def _stopped(self, before: Plan | None, plan: Plan, seen: Seen) -> None:
        self._require(self._stop_asked, "no stop without a request", plan.reason)
        if before is not None and before.phase is Phase.STOPPED:
            same = before.requeuer == plan.requeuer
            self._require(same, "one delegate", f"{before.requeuer}, then {plan.requeuer}")
        else:
            self._requeuer(plan, seen)
        self.stopped = plan

    def _ends_with_its_nodes(self, before: Plan | None, plan: Plan, seen: Seen) -> None:
        """A run ends without a request to stop it if every node that takes part was asked to leave."""
        ends = plan.phase is Phase.STOPPED or (plan.notice is not None and plan.notice.ends)
        if ends and not self._stop_asked:
            unregistered = self._holds_a_lease_elsewhere(before, seen) if before is not None else []
            self._stop_asked = self._all_are_to_leave(plan, seen) and not unregistered

    def _holds_a_lease_elsewhere(self, before: Plan, seen: Seen) -> list[str]:
        """Nodes of the world before whose lease in an earlier store still counts, and that were not asked to leave."""
        found = []
        for seat in (*before.uncleared, *before.seats):
            agent = self.cluster.agents[seat.incarnation]
            asked = agent.asked_to_leave or seat.node_id in self.cluster.told_to_leave
            current = agent.process.alive and agent.incarnation == seat.incarnation and agent.outcome is None
            if seat.incarnation in seen or asked or not current:
                continue
            if (agent.session.deadline_s or 0.0) > agent.machine.clock():
                found.append(seat.node_id)
        return found

    def _all_are_to_leave(self, plan: Plan, seen: Seen) -> bool:
        """Of a refused node that died, the lease may still stand."""
        agents = self.cluster.agents
        taking_part = [
            member
            for key, (member, lease) in seen.items()
            if counts(member, lease) and key not in plan.refused
        ]
        asked = {member.node_id for member in taking_part if agents[member.incarnation].asked_to_leave}
        return {member.node_id for member in taking_part} <= asked | self.cluster.told_to_leave

    def _requeuer(self, plan: Plan, seen: Seen) -> None:
        """One node that is there speaks for the run outside of it; none only if no node is there."""
        if plan.requeuer is None:
            there = [
                key
                for key, known in seen.items()
                if counts(*known) and key not in plan.refused and key in self._known()
            ]
            self._require(not there, "a delegate", f"no node speaks for the run, though {there} are there")
            return
        known, agent = seen.get(plan.requeuer), self.cluster.agents[plan.requeuer]
        self._require(known is not None and counts(*known), "a delegate", f"{plan.requeuer} is gone")
        if self.cluster.well_for_s() > UNWELL_S + 2 * self.cluster.policy.lease_ttl_s:
            self._require(agent.process.alive, "a delegate", f"{plan.requeuer} is dead")

    def _known(self) -> set[str]:
        """Incarnations whose records were not removed."""
        store = self.cluster.endpoint.store
        return set(store.members()) if store is not None else set()

    def read(self, agent: Agent, plan: Plan) -> None:
        """An agent has read this plan, and not acted on it yet."""
        if plan.phase is Phase.STOPPED:
            self._know.add(agent)
        resumed = plan.life < self._newest_life
        late = resumed or plan.generation <= self._earlier_generations  # of a run that was started again
        if (
            plan.notice is not None
            and plan.notice.ends
            and not late
            and (agent.node.has_participated or not plan.is_terminal)
        ):
            self._told_the_end.add(agent)  # not who comes after the stop, to go on with the run

    def announced(self, agent: Agent, member: Member) -> None:
        """An agent that is ready for the generation after the stop wants to go on with the run."""
        plan = agent.node.plan
        if plan is not None and plan.phase is Phase.STOPPED and member.generation > plan.generation:
            rule = "who had the run stopped does not take it up again"
            self._require(not agent.asked_for_the_end, rule, agent.name)

    def departs(self, agent: Agent, ending: Depart) -> None:
        """An agent's part is over."""
        if ending.outcome is Outcome.DRAINED:
            self._others_continue(agent)
        if ending.outcome is not Outcome.STOPPED:
            return
        rule = "no agent departs stopped before the run is"
        self._require(agent in self._know and self.stopped is not None, rule, agent.name)

    def _others_continue(self, agent: Agent) -> None:
        """A node leaves a run that others continue; one that all nodes are asked to leave is stopped."""
        cluster, plan, now_s = self.cluster, agent.node.plan, self.cluster.kernel.now
        calm_s = UNWELL_S + 2 * cluster.policy.lease_ttl_s
        disturbed = cluster.well_for_s() < calm_s or now_s < self.left_at_once_s + calm_s
        if agent.asked_to_leave_s is None or plan is None or plan.is_terminal or disturbed:
            return
        if cluster.scenario.hint_loss:  # it may not have read in time that the run is stopped
            return
        if plan.notice is not None and plan.notice.ends:  # it is, when the workers of others have saved
            return
        asked_before_s = now_s - ANSWER_PATIENCE_S / 2
        agents = [
            holder.agent
            for holder in cluster.holders
            if holder.agent is not None and holder.agent is not agent
        ]
        others = [agent for agent in agents if agent.process.alive and agent.outcome is None]
        continuing = [
            agent
            for agent in others
            if agent.asked_to_leave_s is None or agent.asked_to_leave_s > asked_before_s
        ]
        self._require(bool(continuing), "a run that all nodes are asked to leave is stopped", agent.name)

    # -- what was asked for comes true ----------------------------------------------------------

    def drains(self, agent: Agent, patience_s: float) -> None:
        """This agent was asked to leave: it does, whatever becomes of the store, if only it can do anything."""
        cluster, kernel = self.cluster, self.cluster.kernel
        began_s, slack = kernel.now, 1.0 + 2 * cluster.scenario.max_skew
        within_s = (patience_s + cluster.scenario.stop_s + 0.5) * slack

        def look() -> None:
            moved = not agent.process.frozen and agent.process.thawed_s < began_s
            moved = moved and agent.guard.process.thawed_s < began_s and not agent.guard.process.frozen
            hung = agent.stop_hangs or cluster.stop_hung_s >= began_s
            # Who was asked to stop the run, too, waits for the workers of the others, as the command that asked does.
            if agent.process.alive and moved and not hung and not agent.node.is_lingering:
                self._require(agent.outcome is not None, "a drained node leaves", agent.name)

        kernel.after(within_s, look)

    def drains_other(self, asker: Agent, stop_request: StopRequest) -> None:
        """Another node was asked to leave: it does in time, while all is well."""
        cluster, leaver = self.cluster, stop_request.leaver
        agents = [
            holder.agent
            for holder in cluster.holders
            if holder.node_id == leaver and holder.agent is not None
        ]
        here = [
            agent for agent in agents if agent.process.alive and agent.outcome is None and agent.registered
        ]

        def look() -> None:
            over = cluster.over or self.checker.final is not None
            for agent in here:
                gone = not agent.process.alive or agent.outcome is not None
                self._require(gone or over, "a drained node leaves", agent.name)

        self._later(asker, stop_request, look)

    def stops(self, asker: Agent, stop_request: StopRequest) -> None:
        """The run was asked to stop: it is over in time, while all is well."""
        self._stop_asked = True
        cluster = self.cluster

        def look() -> None:
            over = cluster.over or self.checker.final is not None
            again = self.stopped is not None and self.stopped is not stopped_then
            agents = [holder.agent for holder in cluster.holders if holder.agent is not None]
            all_left = not any(agent.process.alive and agent.outcome is None for agent in agents)
            self._require(over or again or all_left, "a stop request stops the run", stop_request.words)

        stopped_then = self.stopped
        self._later(asker, stop_request, look)

    def asks_for_the_end(self, agent: Agent, stop_request: StopRequest) -> None:
        """This agent says it now; the life of the run that it means is the one that it knows of."""
        if agent.node.plan is not None:
            self._ends_asked[agent, stop_request.serial] = self._life

    def _later(self, asker: Agent, stop_request: StopRequest, look: Callable[[], None]) -> None:
        """Look when this ask must have come true, if all is well until then and was when it was uttered.

        The run may have ended by then, and another one have begun under its name. Where the coordinator is elected, a
        new one gives the workers their whole time again.
        """
        cluster = self.cluster
        left_s = stop_request.left_s * (2.0 if cluster.scenario.store_survives else 1.0)
        within_s = left_s * (1.0 + 2 * cluster.scenario.max_skew) + cluster.scenario.bound_s
        if not asker.registered or asker.session.plan is None or self.checker.final is not None:
            return
        run_began_s = cluster.began_again_s

        def unless_unwell() -> None:
            if cluster.well_for_s() >= within_s + UNWELL_S and cluster.began_again_s == run_began_s:
                look()

        cluster.kernel.after(within_s, unless_unwell)


def counts(member: Member, lease: Lease) -> bool:
    """Return whether this incarnation takes part, by its records."""
    return not lease.revoked and member.state is not State.LEFT
