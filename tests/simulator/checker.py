"""The rules of the design, held against the truth after every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_agent.protocol.codec import decode, encode
from elastic_agent.protocol.forming import STOP_SLACK_S
from elastic_agent.protocol.node import Activity
from elastic_agent.protocol.records import (
    FailureKind,
    Lease,
    Member,
    Phase,
    Plan,
    Refusal,
    State,
    World,
)

from .budget_rules import BudgetRules, counting
from .guard import Group
from .notice_rules import NoticeRules
from .parking_rules import ParkingRules

if TYPE_CHECKING:
    from .agent import Agent
    from .cluster import Cluster
    from .machine import Machine
    from .store import Store

EPSILON_S = 1e-6
NOTICED_S = 0.5
"""How long an agent that is running may take to learn that its workers are gone."""
Seen = dict[str, tuple[Member, Lease]]


class RuleBrokenError(Exception):
    """A rule of the design does not hold; ``rule`` names it."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule


class Checker:
    """Knows the truth about all workers and every word that was published."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.notices = NoticeRules(cluster, self)
        self.budget = BudgetRules(cluster, self)
        self.parking = ParkingRules(cluster, self)
        self.live: list[Group] = []
        self.worlds: dict[int, bytes] = {}
        """Generation → its world as first seen, published or run."""
        self.newest_run = 0
        """The highest generation a worker was ever started for."""
        self.newest_sealed = 0
        self.charged_of: dict[int, int] = {}
        """Generation → restarts charged when it was sealed."""
        self.forming_since_s: float | None = 0.0
        """Since when there is no world, or None while one runs."""
        self.newest: Plan | None = None
        """The plan that was published last."""
        self.final: Plan | None = None
        self.earlier: Plan | None = None
        """The verdict of the run that had this name before, for an agent that slept through the change."""
        self.ended_s = 0.0
        """When the verdict was published."""
        self.newest_history: Plan | None = None
        """What a machine that has read every plan would remember."""
        self._finished: set[str] = set()
        """Incarnations of worlds that finished, in every run of this name."""
        self._begun_in = ""
        """The store with the first plan of the run that began last under this name."""
        self.forgot = False
        """The first plan of a store was made by a coordinator that knew less than others.

        Generations may begin anew then. With etcd, no two worlds run at once all the same; with c10d, they may until
        a lease and the margin after the store was created.
        """
        self._too_few_s = 0.0
        """When there were last fewer nodes than make a world."""
        self._opened_s = 0.0
        """When the present store was created."""
        self.agents: list[Agent] = []
        self._renewed_s: dict[str, float] = {}
        """When a lease was last written by its holder."""
        self._seen_running: dict[str, int] = {}
        """Whom the coordinator that revokes it takes to be running, and which generation."""
        self._intents: dict[bytes, Seen] = {}
        self._intended_charge: dict[int, int] = {}

    def broken(self, rule: str, what: str) -> None:
        """Stop everything: this rule does not hold."""
        raise RuleBrokenError(rule, what)

    def require(self, true: bool, rule: str, what: str) -> None:
        """The rule holds if ``true``."""
        if not true:
            self.broken(rule, what)

    # -- after every step -----------------------------------------------------------------------

    def step(self) -> None:
        """Rules about workers: one generation at a time, and none past its node's deadline."""
        margin_s = self.cluster.policy.fence_margin_s
        for group in self.live:
            agent = group.agent
            machine = agent.machine
            if machine.paused:
                continue  # the exception for hosts paused as a whole: nothing runs there
            if self.forgot:
                if self.cluster.scenario.hosting == "etcd" and not self.being_killed_after_thaw(group):
                    self._only(group.world)
            elif group.generation != self.newest_run and not self.being_killed_after_thaw(group):
                self.broken(
                    "safety 2 (one generation at a time)",
                    f"workers of generation {group.generation} run on {group.agent.name} "
                    f"while generation {self.newest_run} has begun",
                )
            if machine.clock() > agent.guard.deadline_s + margin_s or agent.died_s is not None:
                self._not_past_the_fence(group)
        self.parking.step()

    def _not_past_the_fence(self, group: Group) -> None:
        machine, margin_s = group.agent.machine, self.cluster.policy.fence_margin_s
        past_s = machine.clock() - group.agent.guard.deadline_s - margin_s
        if past_s > EPSILON_S and not self.being_killed_after_thaw(group):
            self.broken(
                "the fence", f"workers on {group.agent.name} run {past_s + margin_s:.3f} s past the deadline"
            )
        died_s = group.agent.died_s
        if (
            died_s is not None
            and self.cluster.kernel.now > max(died_s, machine.last_thaw_s) + margin_s + EPSILON_S
        ):
            self.broken("safety 7 (no worker outlives its agent)", f"workers on {group.agent.name} still run")

    def being_killed_after_thaw(self, group: Group) -> bool:
        """Return whether its machine was paused past the deadline, and its guard is killing it now."""
        return self.kills_after_thaw(group.agent)

    def kills_after_thaw(self, agent: Agent) -> bool:
        """Return whether the agent's machine was paused past the deadline, and its guard is killing its workers now."""
        machine = agent.machine
        just_thawed = (
            self.cluster.kernel.now <= machine.last_thaw_s + self.cluster.scenario.kill_max_s + EPSILON_S
        )
        return just_thawed and machine.clock() >= agent.guard.deadline_s

    # -- workers --------------------------------------------------------------------------------

    def worker_born(self, group: Group) -> None:
        """Workers were started."""
        for other in self.live:
            unknown = self.forgot and self._may_overlap
            if other.agent.holder is group.agent.holder and not (
                unknown or self.being_killed_after_thaw(other)
            ):
                self.broken(
                    "safety 2", f"{group.agent.name} starts workers while its node's others still run"
                )
        self.live.append(group)
        self._same_world(group.world)
        self.newest_run = max(self.newest_run, group.generation)

    def _only(self, world: World) -> None:
        """No workers of another world run."""
        for group in self.live:
            if group.world != world and not (
                group.agent.machine.paused or self.being_killed_after_thaw(group)
            ):
                self.broken(
                    "safety 2 (one world at a time)",
                    f"workers of generation {group.generation} run on {group.agent.name} beside another "
                    f"world, of generation {world.generation}",
                )

    def misses_bootstrap_store(self, world: World) -> None:
        """Workers find no bootstrap store: only if the node that served it does not take part any more."""
        seat = next(seat for seat in world.seats if seat.node_id == world.bootstrap_node)
        host = self.cluster.agents[seat.incarnation]
        takes_part = host.process.alive and host.outcome is None and host.incarnation == seat.incarnation
        busy = host.node.activity in (Activity.PREPARING, Activity.STARTING, Activity.RUNNING)
        self.require(
            not (takes_part and busy and host.node.generation == world.generation),
            "the bootstrap store is served",
            f"{host.name} does not serve that of generation {world.generation}",
        )

    def worker_ended(self, group: Group) -> None:
        """Workers are gone. Only the guard tells its agent, if the guard has killed them."""
        self.live.remove(group)
        if group.exited not in ("success", "left", "parked"):
            self.cluster.kernel.after(NOTICED_S, self._was_noticed, group)

    def _was_noticed(self, group: Group) -> None:
        agent, now_s = group.agent, self.cluster.kernel.now
        if agent.process.frozen or now_s < agent.process.thawed_s + NOTICED_S:
            self.cluster.kernel.after(NOTICED_S, self._was_noticed, group)
            return
        goes_on = agent.node.activity in (Activity.STARTING, Activity.RUNNING) and agent.outcome is None
        self.require(
            not (agent.process.alive and goes_on and agent.guard.group is group),
            "a node knows that its workers are gone",
            f"{agent.name}: {group.exited}",
        )

    def _same_world(self, world: World) -> None:
        data = encode(world)
        if self.forgot:
            return
        known = self.worlds.setdefault(world.generation, data)
        self.require(
            known == data,
            "safety 1 (one world per generation)",
            f"generation {world.generation} has two worlds: {known.decode()} and {data.decode()}",
        )

    # -- what nodes say -------------------------------------------------------------------------

    def announced(self, agent: Agent, member: Member) -> None:
        """A node is about to write this about itself."""
        if member.state not in (State.READY, State.STOPPED, State.LEFT):
            return
        self.notices.announced(agent, member)
        self.parking.announced(agent, member)
        for group in self.live:
            older = group.generation < member.generation or member.state is not State.READY
            if group.agent is agent and older:
                self.broken(
                    "safety 2 (ready only when stopped)",
                    f"{agent.name} says {member.state}({member.generation}) while its workers of "
                    f"generation {group.generation} run",
                )

    def renewed(self, incarnation: str) -> None:
        """A lease was written in a store by its holder."""
        self._renewed_s[incarnation] = self.cluster.kernel.now

    def revokes(self, member: Member) -> None:
        """A coordinator is about to revoke this node, knowing that."""
        running = member.state is State.RUNNING
        self._seen_running[member.incarnation] = member.generation if running else -1

    def revoked(self, store: Store, lease: Lease) -> None:
        """A lease was revoked in the store: not of a running node that renewed it within its time."""
        self.cluster.story("store", "lease of {} condemned", lease.incarnation)
        plan = store.plan
        replaced = any(lease.incarnation in member.replaces for member in store.members().values())
        if replaced or plan is None or plan.phase is not Phase.RUNNING:
            return
        if self._seen_running.get(lease.incarnation) == plan.generation:
            ago_s = self.cluster.kernel.now - self._renewed_s.get(lease.incarnation, float("-inf"))
            least_s = lease.ttl_s * (1.0 - 2.0 * self.cluster.scenario.max_skew)
            self.require(
                ago_s >= least_s,
                "a running world is kept",
                f"{lease.incarnation} is condemned {ago_s:.3f} s after it renewed",
            )

    # -- plans ----------------------------------------------------------------------------------

    def intends(self, plan: Plan, seen: Seen) -> None:
        """A coordinator is about to publish this, knowing that."""
        self._intents[encode(plan)] = dict(seen)
        known = self._intended_charge.get(plan.generation, 0)
        self._intended_charge[plan.generation] = max(known, plan.charged)
        self.budget.intends(plan)

    def publishes(self, machine: Machine, plan: Plan) -> None:
        """A coordinator on this machine is about to publish a plan: its disk has it, unless that is full or slow."""
        kept = machine.disk
        self.require(
            machine.disk_is_behind or (kept is not None and kept.rank >= plan.rank),
            "safety 1 (what is published is on disk)",
            f"generation {plan.generation} is about to be published, and on disk is {kept}",
        )

    def saved(self, history: Plan, kept: Plan | None) -> None:
        """A coordinator is told that this, or what is newer, is on disk."""
        self.require(
            kept is not None and kept.rank >= history.rank,
            "safety 1 (what is published is on disk)",
            f"generation {history.generation} is published, and on disk is {kept}",
        )

    def seen_by(self, plan: Plan) -> Seen:
        """Return what the coordinator knew of the nodes that made this plan."""
        return self._intents.get(encode(plan), {})

    def published(self, store: Store, before: Plan | None, plan: Plan) -> None:
        """A plan was written into a store."""
        self.cluster.story(
            "store",
            "plan {}: {}({}) charged {} | {}",
            plan.version,
            plan.phase,
            plan.generation,
            plan.charged,
            plan.reason,
        )
        self.newest = plan
        seen = self.seen_by(plan)
        if before is None and self._knows_less(plan):
            self._forget(plan)
        if self.newest_history is None or plan.newness >= self.newest_history.newness:
            self.newest_history = plan
        follows = plan.version == (before.version + 1 if before is not None else 1)
        self.require(follows, "plan versions", f"{plan.version} follows {before and before.version}")
        if before is not None:
            self._follows(store, before, plan, seen)
        else:
            self._first_of_store(plan)
        if before is not None and not self.forgot:
            self.budget.published(before, plan)
        if plan.phase is Phase.RUNNING and (before is None or before.phase is not Phase.RUNNING):
            self._sealed(before, plan, seen)
        self._goes_above(before, plan, seen)
        self.notices.published(store, before, plan, seen)
        if plan.is_terminal:
            self._ended(store, before, plan, seen)
        self._begun_in = self._begun_in or store.store_id
        self._refusals(before, plan)
        if plan.phase is not Phase.FORMING:
            self.forming_since_s = None
        elif self.forming_since_s is None:
            self.forming_since_s = self.cluster.kernel.now

    def _knows_less(self, told: Plan) -> bool:
        """Return whether a new store begins with less than was known before, or with another run of that name."""
        known = self.newest_history
        if not self.cluster.endpoint.may_forget or known is None:
            return False
        # A full disk keeps neither the outcome nor the budget; one that was lost keeps no settings.
        ended = known.phase in (Phase.FINISHED, Phase.FAILED) and not known.settled and not told.is_terminal
        poorer = told.charged < known.charged or told.policy.lease_ttl_s < known.policy.lease_ttl_s
        # It may have heard of the generation when that formed, from a node whose disk was not full.
        misses_world = known.world is not None and (
            told.world is None or told.world.generation < known.world.generation
        )
        return ended or poorer or misses_world or told.rank < known.rank or told.life != known.life

    def _forget(self, plan: Plan) -> None:
        """Discard what was counted before, save for a world that runs or has ended."""
        self.cluster.story("checker", "the run begins anew for a coordinator that knows less")
        self.forgot = True
        self.final = None
        goes_on = (
            {seat.incarnation for seat in plan.world.seats}
            if (plan.phase is Phase.RUNNING or plan.is_terminal) and plan.world
            else set()
        )
        generations = self.cluster.job.generations
        for number in [*generations]:
            if number != plan.generation or not generations[number].groups.keys() <= goes_on:
                del generations[number]

    def begin_again(self) -> None:
        """A new run begins under the same name: above the old generations, with the whole budget."""
        stopped = self.final is not None and self.final.phase is Phase.STOPPED
        self.final, self.earlier, self._begun_in = None, self.final, ""
        self.forming_since_s = self.cluster.kernel.now
        self.notices.begin_again()
        if stopped:
            return  # the same run goes on
        self.cluster.job.begin_anew()
        self.budget.begin_again()
        self._intended_charge = {0: 0}
        self.charged_of[self.newest_sealed] = 0

    def store_opened(self) -> None:
        """A new store knows no world."""
        self._opened_s = self.cluster.kernel.now
        if self.forming_since_s is None:
            self.forming_since_s = self.cluster.kernel.now

    @property
    def _lost_since_begun_again(self) -> bool:
        """Return whether etcd lost its data after everything was started again, perhaps before the first plan."""
        cluster = self.cluster
        return cluster.scenario.hosting == "etcd" and self._opened_s > cluster.began_again_s > 0

    def _follows(self, store: Store, before: Plan, plan: Plan, seen: Seen) -> None:
        rule = "safety 4 (generations only grow)"
        self.require(plan.generation >= before.generation, rule, f"{before.generation} → {plan.generation}")
        goes_on = self.forgot and before.is_terminal and plan.phase is Phase.FORMING  # nodes train above it
        if goes_on or self._next_life(before, plan, seen):
            self.final = None
        self.require(self.final is None or plan.phase is self.final.phase, "the outcome stands", plan.reason)
        sealing = before.phase is Phase.FORMING and plan.phase is Phase.RUNNING
        if not sealing and not self.forgot:
            # Above a world that another coordinator sealed on its disk, or in a store that is lost.
            goes_above = before.phase is plan.phase is Phase.FORMING and plan.generation > before.generation
            written = self._intended_charge[before.generation] if goes_above else before.charged
            is_charged_once = plan.charged in (before.charged, written)
            self.require(is_charged_once, "safety 5 (budget)", "charged without sealing")
        if before.phase is Phase.RUNNING and plan.phase is Phase.FORMING:
            self._has_a_cause(store, before, plan)
            left = any(member.state is State.SAVED for member, _ in seen.values())
            if plan.free and not left and (before.notice is None or plan.failure is not None):
                self._really_free(plan, seen)

    def _goes_above(self, before: Plan | None, plan: Plan, seen: Seen) -> None:
        """A coordinator that was told of a later world in which workers may run decides nothing below it."""
        if before is not None and (
            before.is_terminal or (before.phase, before.generation) == (plan.phase, plan.generation)
        ):
            return
        for name, (member, lease) in seen.items():
            told = member.history
            if told is None or told.world is None or told.settled or lease.revoked:
                continue
            self.require(
                plan.generation >= told.world.generation,
                "safety 4 (a later generation is gone above)",
                f"generation {plan.generation} ({plan.phase}), while {name} tells of {told.world.generation}",
            )

    def _next_life(self, before: Plan, plan: Plan, seen: Seen) -> bool:
        """Return whether a stopped run is resumed, by an agent that was started for that."""
        if before.phase is not Phase.STOPPED or plan.phase is not Phase.FORMING:
            return False
        came = [
            key
            for key, (member, _) in seen.items()
            if (member.state, member.generation) == (State.READY, before.generation + 1)
            and not self.cluster.agents[key].node.has_participated
        ]
        self.require(bool(came), "the outcome stands", "no agent was started to resume the stopped run")
        self.require(plan.generation == before.generation + 1, "the next life", "its generation")
        return True

    def _has_a_cause(self, store: Store, before: Plan, plan: Plan) -> None:
        """A change of coordinator alone is none: by what is in the store, a node departed, failed or joins."""
        assert before.world is not None  # it ran
        if plan.failure is not None or plan.joining or plan.generation > before.generation + 1:
            return
        if before.notice is not None:
            return  # whether it ended in its time is a rule of notices
        members, leases = store.members(), store.leases()
        for seat in before.world.seats:
            member, lease = members.get(seat.incarnation), leases.get(seat.incarnation)
            if member is None or lease is None or decode(Lease, lease).revoked:
                return
            running = member.state in (State.READY, State.RUNNING, State.SUCCEEDED)
            if not running or member.generation != before.generation or interrupted(member):
                return
        self.broken("a running world is kept", f"no node departed, failed or joined: {plan.reason}")

    def _really_free(self, plan: Plan, seen: Seen) -> None:
        dropped = any(
            seat.incarnation in seen and seen[seat.incarnation][0].generation >= plan.generation
            for seat in plan.uncleared
        )
        higher = any(
            member.history is not None and member.history.generation >= plan.generation - 1
            for member, _ in seen.values()
        )
        signalled = any(interrupted(member) for member, _ in seen.values())
        lost = any(departed(seat.incarnation, seen) for seat in plan.uncleared)
        truly = dropped or higher or signalled or lost
        self.require(truly, "safety 5 (budget)", "a failure is not charged though no node departed")

    def _first_of_store(self, plan: Plan) -> None:
        if self.forgot:
            self._keeps_the_outcome(plan)
            return
        if self.earlier is not None and plan.is_terminal and plan.newness == self.earlier.newness:
            return  # etcd lost that all had read the outcome, before the nodes of the next run could read it there
        most = max(self._intended_charge.values(), default=0)
        least = self.charged_of.get(self.newest_sealed, 0)
        self.require(least <= plan.charged <= most, "safety 5 (budget)", f"a new store says {plan.charged}")
        self.budget.first_of_store(plan)
        self._keeps_the_outcome(plan)

    def _keeps_the_outcome(self, plan: Plan) -> None:
        if self.final is not None and self.final.phase is Phase.STOPPED:
            self.final = None  # agents that lost the store before reading of it, or were started since, go on
        elif self.final is not None:
            self.require(
                plan.phase is self.final.phase, "the outcome stands", f"a new store says {plan.phase}"
            )

    def _sealed(self, before: Plan | None, plan: Plan, seen: Seen) -> None:
        world, policy = plan.world, plan.policy
        assert world is not None
        self.require(
            world.generation == plan.generation, "safety 1", "the plan's world is another generation's"
        )
        self._same_world(world)
        served_by = {seat.node_id for seat in world.seats}
        self.require(
            world.bootstrap_node in served_by, "bootstrap store", f"{world.bootstrap_node} has no seat"
        )
        low, high = policy.min_nodes, policy.max_nodes
        self.require(low <= len(world.seats) <= high, "safety 3", f"{len(world.seats)} nodes")
        adopted = before is None
        if self.forgot:
            if not self._may_overlap:
                self._only(world)
            return
        if not adopted:
            self.require(
                plan.generation > self.newest_sealed,
                "safety 4 (generations never repeat)",
                f"generation {plan.generation} is sealed after {self.newest_sealed}",
            )
            assert before is not None
            self._charged_rightly(before, plan, seen)
        else:
            self.budget.sealed(plan, charged=False)
        self._nobody_runs(plan.generation)
        self.newest_sealed = max(self.newest_sealed, plan.generation)
        self.charged_of[plan.generation] = plan.charged

    @property
    def _may_overlap(self) -> bool:
        """Return whether workers may still run of which a store that knows less than they was not told."""
        policy, since_s = self.cluster.policy, self.cluster.kernel.now - self._opened_s
        alone_s = (policy.lease_ttl_s + policy.fence_margin_s) * (1.0 + 2.0 * self.cluster.scenario.max_skew)
        return self.cluster.scenario.hosting != "etcd" and since_s < alone_s

    def _nobody_runs(self, generation: int) -> None:
        for group in self.live:
            if group.generation < generation and not (
                group.agent.machine.paused or self.being_killed_after_thaw(group)
            ):
                self.broken(
                    "safety 2 (sealed only when all are cleared)",
                    f"generation {generation} is sealed while workers of {group.generation} "
                    f"run on {group.agent.name}",
                )

    def _charged_rightly(self, before: Plan, plan: Plan, seen: Seen) -> None:
        rule = "safety 5 (budget)"
        delta = plan.charged - before.charged
        due = self._charge_due(before, seen)
        self.require(delta in (0, 1), rule, f"{delta} charged at once")
        if delta:
            self.require(counting(before) < plan.policy.max_restarts, rule, f"{before.budget}, and one more")
        if due is not None:
            self.require(delta == due, rule, f"{delta} charged for {before.reason!r}, {due} due")
        if delta and before.failure is not None and before.failure.kind is FailureKind.WORKER:
            previous = before.world.generation if before.world is not None else 0
            truth = self.cluster.job.of(previous)
            self.require(truth.failed, rule, f"charged, but no worker failed in generation {previous}")

    def _charge_due(self, before: Plan, seen: Seen) -> int | None:
        """Return what this sealing is to charge; None where that depends on who can be spared (failed starts)."""
        failure = before.failure
        if failure is None or before.free:
            return 0
        if any(departed(seat.incarnation, seen) for seat in before.uncleared):
            return 0
        if failure.kind in (FailureKind.WORKER, FailureKind.HANG):
            return 1
        return None if max(before.start_failures.values(), default=0) >= 2 else 0

    def _ended(self, store: Store, before: Plan | None, plan: Plan, seen: Seen) -> None:
        if self.final is not None:
            return
        self.final, self.ended_s = plan, self.cluster.kernel.now
        if plan.phase is Phase.FINISHED:
            assert plan.world is not None
            truth = self.cluster.job.of(plan.generation)
            incarnations = {seat.incarnation for seat in plan.world.seats}
            # If the store is lost after the next run began, the one after it may repeat the outcome of the run before.
            elsewhere = self._begun_in not in ("", store.store_id) or self._lost_since_begun_again
            repeatable = self._finished if elsewhere else set[str]()
            missing = incarnations - truth.succeeded - repeatable
            self.require(not missing, "finished when all succeeded", f"{missing} did not")
            self._finished |= incarnations
        elif plan.phase is Phase.STOPPED:
            pass  # see the rules of notices
        elif "unreadable" in plan.reason:
            self.broken("no run fails by its own plans", plan.reason)
        elif "restart" in plan.reason:
            assert before is not None
            self.require(
                self._charge_due(before, seen) != 0, "safety 5 (budget)", "failed without a charge due"
            )
            spent = counting(before) >= before.policy.max_restarts or self.forgot
            self.require(spent, "safety 5 (budget)", f"only {counting(before)} count")
        elif "the same failure" in plan.reason:
            assert before is not None
            self.require(
                self._charge_due(before, seen) != 0, "safety 5 (budget)", "given up without a charge due"
            )
            if not self.forgot:
                self.budget.gave_up(before)
        else:
            self.cluster.check_too_few(plan)

    # -- once the faults are over ---------------------------------------------------------------

    def watch_liveness(self) -> None:
        """From the end of the faults on: no formation takes longer than promised."""
        cluster = self.cluster
        if cluster.over or (self.final is not None and self.final.phase is not Phase.STOPPED):
            return
        enough = cluster.enough_healthy() and cluster.has_host()
        if not enough:  # a machine may boot long after the last fault, that of the endpoint, too
            self._too_few_s = cluster.kernel.now
        since_s = max(
            self.forming_since_s or 0.0, cluster.scenario.quiet_s, cluster.stop_hung_s, self._too_few_s
        )
        bound_s = cluster.scenario.bound_s + self.revocations_s() + self.budget.pause_s(self.newest)
        if any(holder.stop_hangs for holder in cluster.holders):
            bound_s += STOP_SLACK_S
        late = cluster.kernel.now - since_s > bound_s
        if enough and late and self.forming_since_s is not None:
            well = len(cluster.healthy())
            self.broken(
                "liveness (a world is sealed in time)", f"{well} nodes are well; no world in {bound_s:.1f} s"
            )
        cluster.kernel.after(0.2, self.watch_liveness)

    def revocations_s(self) -> float:
        """Return how long it takes to end the leases of incarnations that died: a round trip to the store for each.

        Faults may leave hundreds within a few lease times, more than any cluster would.
        """
        dead = sum(not agent.process.alive for agent in self.cluster.agents.values())
        return 4 * self.cluster.scenario.latency_s * dead

    def losses_were_noticed(self) -> None:
        """Some time after the end of the faults no running plan counts on nodes that are gone."""
        store = self.cluster.endpoint.store
        plan = store.plan if store is not None else None
        if plan is None or plan.phase is not Phase.RUNNING or plan.world is None:
            return
        if not self.cluster.healthy():
            return  # no agent is left that could notice
        for seat in plan.world.seats:
            agent = self.cluster.agents[seat.incarnation]
            there = agent.process.alive and agent.incarnation == seat.incarnation
            succeeded = seat.incarnation in self.cluster.job.of(plan.generation).succeeded
            ago_s = self.cluster.kernel.now - (agent.died_s or 0.0)
            just_now = ago_s < self.cluster.scenario.bound_s  # by a gremlin that is gone since
            if not there and not succeeded and not just_now:
                self.broken("liveness (losses are noticed)", f"{seat.node_id} is gone but counted on")

    def second_agents_were_refused(self) -> None:
        """Some time after the end of the faults no two agents go on under one node id.

        One whose stop of its workers hangs has no lease meanwhile, so there is nothing to refuse it for. One that finds
        no store is refused by none.
        """
        if self.cluster.over:
            return  # nothing is served any more
        settled_s = self.cluster.kernel.now - self.cluster.scenario.bound_s
        going_on = [
            holder.node_id
            for holder in self.cluster.holders
            if holder.agent is not None
            and holder.agent.process.alive
            and holder.agent.outcome is None
            and (holder.agent.registered or self.cluster.endpoint.serving)
            and not holder.agent.stop_hangs
            and holder.agent.began_s < settled_s
        ]
        for node_id in set(going_on):
            self.require(
                going_on.count(node_id) == 1, "a second agent is refused", f"{node_id} has several agents"
            )

    def all_is_over(self) -> None:
        """In the end the run has an outcome, and every agent departed with it."""
        cluster = self.cluster
        all_gone = not any(
            holder.agent is not None and holder.agent.process.alive for holder in cluster.holders
        )
        if self.final is None and not all_gone:
            self.broken("liveness (every run ends)", "the run has no outcome")
        for holder in cluster.holders:
            agent = holder.agent
            if agent is not None and agent.process.alive:
                self.broken("liveness (every agent departs)", f"{agent.name} is still here")
        removes = cluster.scenario.hosting == "etcd" and self.final is not None
        if removes and self.ended_s > cluster.scenario.quiet_s:
            self.require(cluster.over, "liveness (every run is removed)", "its records are still there")
        for agent in cluster.gone:
            if not cluster.outcome_expected(agent) and not self.forgot:
                self.broken("every node departs with the outcome", f"{agent.name}: {agent.outcome}")

    def _refusals(self, before: Plan | None, plan: Plan) -> None:
        for incarnation in plan.refused:
            if before is None or incarnation not in before.refused:
                self.cluster.check_refusal(incarnation, plan.refused[incarnation])
                self._keeps_its_id(before, incarnation, plan.refused[incarnation])

    def _keeps_its_id(self, before: Plan | None, incarnation: str, refusal: Refusal) -> None:
        """Other agents with a node's id are refused, and not the one that has a seat."""
        world = before.world if before is not None and before.phase is Phase.RUNNING else None
        if world is not None and refusal.is_node_id_held:
            seatless = world.seat_of(incarnation) is None
            self.require(seatless, "a node keeps its id", f"{incarnation} has a seat: {refusal.why}")


def interrupted(member: Member) -> bool:
    """Return whether a signal that its agent received, too, has terminated workers of this node."""
    return member.failure is not None and member.failure.kind is FailureKind.INTERRUPTED


def departed(incarnation: str, seen: Seen) -> bool:
    """Return whether, by what is written, this participant was lost, restarted, fenced or is leaving."""
    if incarnation not in seen:
        return True
    member, lease = seen[incarnation]
    if lease.revoked or member.state in (State.LEAVING, State.LEFT):
        return True
    return any(incarnation in other.replaces for other, _ in seen.values())
