"""The coordinator of a run, without I/O: it takes in the records of the store and decides what to do.

Theory of operation. The driver (in an agent, or in the simulator) reads member and lease
records, hands them to :meth:`Coordinator.observe`, and calls :meth:`Coordinator.decide`. The decision may
hold a plan to publish (a compare-and-set against the version before it), leases to revoke (likewise) and
records to remove. The driver reports what of it came about (:meth:`published`, :meth:`revoked`,
:meth:`forgotten`) and repeats this until nothing is left to do. After an unknown outcome it re-reads the plan and
calls :meth:`published`. Time is an argument everywhere: seconds of the coordinator's own clock.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from . import budget
from .cluster_view import (
    ClusterView,
    Decision,
    PhaseClock,
    clearance_deadlines,
    departed,
    leased_too_long,
    names,
    node_names,
)
from .codec import RecordError, check_readable
from .forming import await_clearing, decide_forming
from .leases import FAR_S, LeaseLedger, Sighting
from .notices import acknowledge
from .records import LONGEST_TEXT, RECORD_VERSION, Lease, Member, Phase, Plan, Refusal, State, World
from .running import decide_running, whole_world_runs

FINISHED_BEFORE = "the run has already finished and is not repeated under the same id"

MAX_REFUSED = 256
"""The most refusals that a plan holds: every node reads them."""

FORGET_AT_ONCE = 16
"""The most records that are removed before the coordinator reads what is new: each takes a round trip to the store."""

ACK_PATIENCE_LEASES = 2.0
"""The number of lease times for which the outcome is kept for live members that do not acknowledge it."""


class Coordinator:
    """Holds the plan, the ledger of leases, and the phase's clock."""

    def __init__(
        self,
        now_s: float,
        plan: Plan | None = None,
        remembered: Plan | None = None,
        store_born_s: float = -FAR_S,
    ) -> None:
        """Start to coordinate a run.

        Args:
            now_s: the coordinator's clock.
            plan: the newest plan in the store, if there is one.
            remembered: the run history on this agent's disk, used when the store is empty.
            store_born_s: the latest time at which this store can have been created, if an earlier one may have known
                nodes that are missing from this agent's disk.
        """
        self.plan = plan
        self.ledger = LeaseLedger(born_s=now_s)
        self.clock = PhaseClock(since_s=now_s)
        if plan is not None:
            self.clock = PhaseClock.of(plan, self.clock, now_s, new_phase=True)
        self._remembered = remembered
        self._store_born_s = store_born_s

    # -- input from the driver ------------------------------------------------------------------

    def observe(self, member: Member, lease: Lease, now_s: float, written_s: float | None = None) -> None:
        """Take in the newest records of one incarnation; ``written_s``: see :meth:`LeaseLedger.observe`."""
        if member.incarnation == lease.incarnation:
            self.ledger.observe(member, lease, now_s, written_s)

    def revoked(self, incarnation: str, gone_s: float | None = None) -> None:
        """Take in that the revocation won: nothing renews the lease any more. ``gone_s``: see :class:`LeaseLedger`."""
        self.ledger.revoked(incarnation, gone_s)

    def forgotten(self, incarnation: str) -> None:
        """Take in that the incarnation's records were removed."""
        self.ledger.forget(incarnation)

    def published(self, plan: Plan, now_s: float) -> None:
        """Take note of the newest plan in the store."""
        if self.plan is None or plan.version > self.plan.version:
            before = (self.plan.phase, self.plan.generation) if self.plan is not None else None
            new_phase = before != (plan.phase, plan.generation)
            self.clock = PhaseClock.of(plan, self.clock, now_s, new_phase=new_phase)
            self.plan = plan

    def stood_still(self, now_s: float, lasted_s: float) -> None:
        """Take in that the coordinator was paused for that long, until now: no node is considered late because of it.

        Call this after all records were read again. Leases are extended, and the time does not count for the phase.
        """
        self.ledger.compensate_pause(now_s)
        self.clock.skip(lasted_s, now_s)

    @property
    def has_live_members(self) -> bool:
        """Return whether a member is alive and has not left."""
        return any(
            node.alive and node.member.state is not State.LEFT for node in self.ledger.sightings.values()
        )

    # -- decisions ------------------------------------------------------------------------------

    def decide(self, now_s: float) -> Decision:
        """Return what to do now, with the reason. A second call without new input changes nothing."""
        decision = self._decide(now_s)
        if decision.plan is None:
            return decision
        try:
            check_readable(decision.plan)
        except RecordError as error:
            # Nodes would wait for ever for a plan that they can follow (a world too large for one plan, say).
            return _failed_by(error, self.plan or decision.plan, decision)
        return decision

    def _decide(self, now_s: float) -> Decision:
        if self.plan is None:
            return self._alone(self._first_plan(now_s), now_s)
        now = ClusterView.of(self.plan, self.ledger, self.clock, now_s)
        overdue = self._overdue(now_s)
        # Before any lease is revoked: a node that may run what this plan does not know counts until then, and its
        # workers may run on for the fence margin.
        if beyond := self._beyond(self.plan):
            decision = _above(now, beyond)
        elif (refused := self._refusals(now)) is not None or overdue:
            decision = Decision("housekeeping", refused, overdue, wake_s=now_s)
        elif self.plan.is_terminal:
            decision = self._wind_up(now)
        elif (acknowledged := acknowledge(now)) is not None:
            decision = acknowledged
        elif self.plan.phase is Phase.FORMING:
            decision = decide_forming(now)
        else:
            decision = decide_running(now)
        return self._with_housekeeping(self._with_departures(now, self._with_progress(now, decision)), now_s)

    def _with_progress(self, now: ClusterView, decision: Decision) -> Decision:
        """Count the progress of the running world, and have it written into the plan now and then."""
        if now.plan.phase is not Phase.RUNNING:
            return decision
        if now.clock.world_runs_since_s is None and whole_world_runs(now):
            now.clock.world_runs_since_s = now.now_s
            now.clock.progress_before_s = now.plan.budget.progress_s
        write_at_s = budget.write_at_s(now)
        following = decision.plan
        if following is None and now.now_s >= write_at_s:
            following = now.plan.following()
        if following is None:
            return replace(decision, wake_s=min(decision.wake_s, write_at_s))
        return replace(decision, plan=budget.with_progress(now, following))

    # -- the first plan of a store --------------------------------------------------------------

    def _first_plan(self, now_s: float) -> Decision:
        alive = [node for node in self.ledger.sightings.values() if node.alive]
        if not alive:
            return Decision("no nodes have joined yet")
        policy = min(alive, key=lambda node: (node.first_seen_s, node.member.node_id)).member.policy
        history = max(self._histories(), key=lambda history: history.newness, default=None)
        if history is not None:
            policy = policy.covering(history)
        fresh = Plan(RECORD_VERSION, 1, Phase.FORMING, 1, "the run starts", policy)
        if history is None:
            return Decision.to_publish(fresh)
        if history.settled and history.phase is Phase.STOPPED:  # the same run, resumed
            return Decision.to_publish(_next_life(fresh, history))
        once = policy.skips(history)
        difference = policy.job.difference(history.policy.job)
        # A run that did something else, or in another job, need not be settled: its outcome is no news for these nodes.
        outcomes = (Phase.FINISHED, Phase.FAILED)
        is_over = history.settled or (difference and history.phase in outcomes)
        if is_over and not once:  # another run under the same name
            generation, before = history.generation + 1, f"{history.phase}{difference}"
            reason = (
                f"a run with this id {before} before, in generation {history.generation}; a new one starts"
            )
            again = msgspec.structs.replace(
                fresh, generation=generation, life=generation, order=history.order, reason=reason
            )
            return Decision.to_publish(again)
        known = msgspec.structs.replace(
            fresh,
            generation=history.generation,
            charged=history.charged,
            budget=history.budget,
            order=history.order,
            world=history.world,
            life=history.life,
        )
        if once:
            over = msgspec.structs.replace(known, phase=Phase.FINISHED, reason=FINISHED_BEFORE)
            return Decision.to_publish(over)
        ours = self._remembered
        if ours is not None and ours.phase in outcomes and ours.rank == history.rank:
            reason = f"the run {ours.phase} before the store was lost"
            return Decision.to_publish(msgspec.structs.replace(known, phase=ours.phase, reason=reason))
        if history.world is None:
            return Decision.to_publish(msgspec.structs.replace(known, generation=history.generation + 1))
        return self._adopt_or_reform(known, history.world, now_s)

    def _alone(self, decision: Decision, now_s: float) -> Decision:
        """Decide the same, but form nothing while nodes may run that only an earlier life of the store knew.

        By then each of them has either registered with what it runs, or lost its lease.
        """
        if decision.plan is None or decision.plan.phase is not Phase.FORMING:
            return decision
        policy = decision.plan.policy
        until_s = self._store_born_s + policy.lease_ttl_s + policy.fence_margin_s
        if now_s >= until_s:
            return decision
        return Decision(
            "the store is empty; waiting for nodes of an earlier store to register", wake_s=until_s
        )

    def _adopt_or_reform(self, known: Plan, world: World, now_s: float) -> Decision:
        """Keep a known world in a new store if all of it still runs; else form the next one."""
        found = [(seat, self.ledger.sightings.get(seat.incarnation)) for seat in world.seats]
        missing = [seat for seat, node in found if node is None]
        restarted = [seat for seat in world.seats if seat.incarnation in self.ledger.replaced()]
        if known.generation > world.generation:
            reason = "the store was lost while a generation was forming"
        elif any(node is not None and not _still_runs(node, world) for _, node in found):
            reason = f"the store was lost, and generation {world.generation} does not run any more"
        elif restarted:
            reason = f"the store was lost, and {node_names(restarted)} joined anew"
        elif not missing:
            reason = f"the store was lost; generation {world.generation} continues without a restart"
            return Decision.to_publish(msgspec.structs.replace(known, phase=Phase.RUNNING, reason=reason))
        elif now_s < (until_s := self.ledger.born_s + known.policy.lease_ttl_s):
            reason = f"the store is empty; waiting for {node_names(missing)} to register"
            return Decision(reason, wake_s=until_s)
        else:
            reason = f"the store was lost together with {node_names(missing)}"
        if len(restarted or missing) == len(world.seats):
            reason = f"resuming the run after generation {world.generation}, which was interrupted"
        plan = known.forming(reason, free=True)
        return Decision.to_publish(msgspec.structs.replace(plan, version=1))

    def _histories(self) -> list[Plan]:
        nodes = (node.member.history for node in self.ledger.sightings.values())
        return [history for history in (*nodes, self._remembered) if history is not None]

    def _beyond(self, plan: Plan) -> list[Plan]:
        """Return what is reported of generations, or of worlds in which workers may run, that this plan ignores.

        While a world runs, a later *world* counts. A generation that was only to be formed may be one that a
        coordinator wrote to its disk and could not publish, having lost leadership: no worker ever ran in it. When the
        run is over, what nodes run counts: it is not over while nodes train that were not registered here.

        An earlier world counts while a generation forms. Nothing of the run's own past is like that: a node that was
        not cleared then has lost its lease since. But two runs of one name may have shared the state directory, and
        the history on this machine is the other run's.
        """
        awaited = {seat.incarnation for seat in plan.seats_at_risk}
        alive = [node.member for node in self.ledger.sightings.values() if node.alive]
        histories: list[Plan | None]
        if plan.is_terminal:
            histories = [_history_it_runs(member) for member in alive]
        elif plan.phase is Phase.RUNNING:
            histories = [
                history
                for history in self._histories()
                if history.world is not None
                and not history.settled
                and history.world.generation > plan.generation
            ]
        else:
            histories = list(self._histories())
        later = [known for known in histories if known is not None and known.is_later_than(plan)]
        if plan.phase is not Phase.FORMING:
            return later
        return later + [
            member.history
            for member in alive
            if member.history is not None
            and not member.history.settled
            and member.incarnation not in awaited
            and _may_run(member)
        ]

    # -- every phase ----------------------------------------------------------------------------

    def _overdue(self, now_s: float) -> dict[str, str]:
        """Return leases that ran out, and incarnations whose successor has proven them gone; with the reason."""
        replaced = self.ledger.replaced()
        overdue: dict[str, str] = {}
        for key, node in self.ledger.sightings.items():
            if node.alive and key in replaced:
                overdue[key] = "replaced by a later incarnation of the node"
            elif node.alive and now_s >= node.ends_s:
                overdue[key] = f"did not renew its lease within {node.lease.ttl_s:g} s"
        return overdue

    def _refusals(self, now: ClusterView) -> Plan | None:
        """Return incarnations to refuse: a second agent with a live node's id, a lease longer than the run's."""
        before = now.plan.refused
        refused = {key: refusal for key, refusal in before.items() if key in now.ledger.sightings}
        for node in now.ledger.sightings.values():
            if not node.alive or node.member.incarnation in refused or node.member.state is State.LEFT:
                continue
            refusal = self._refusal(now, node) if len(refused) < MAX_REFUSED else None
            if refusal is not None:
                refused[node.member.incarnation] = refusal
        if set(refused) <= set(before):
            return None
        words = (self._told(key, refusal) for key, refusal in refused.items() if key not in before)
        return now.plan.following(names(words), refused=refused)

    def _told(self, incarnation: str, refusal: Refusal) -> str:
        """Return what the other nodes are told of a refusal."""
        member = self.ledger.sightings[incarnation].member
        if not refusal.is_node_id_held:
            return f"refused: {refusal.why}"
        return f"an agent at {member.address} also calls itself {member.node_id} and was refused"

    @staticmethod
    def _refusal(now: ClusterView, node: Sighting) -> Refusal | None:
        member = node.member
        if leased_too_long(node, now.policy):
            why = (
                f"{member.node_id} requests a lease of {node.lease.ttl_s:g} s, longer than the run's "
                f"{now.policy.lease_ttl_s:g} s; start every agent with the same --lease-ttl"
            )
            return Refusal(why[:LONGEST_TEXT])
        holder = now.by_node.get(member.node_id)
        if holder is None or holder is node or member.incarnation in holder.member.replaces:
            return None
        if holder.member.incarnation in member.replaces or not holder.seen_alive_since(node.first_seen_s):
            return None  # perhaps the newcomer is the holder's node, restarted
        why = f"node id {member.node_id} is held by a living agent at {holder.member.address}"
        return Refusal(why[:LONGEST_TEXT], is_node_id_held=True)

    @staticmethod
    def _with_departures(now: ClusterView, decision: Decision) -> Decision:
        """Publish, if nothing else is to be published, that nodes which were to leave have left.

        Commands such as ``drain`` return by this: only then has the last worker of the node exited.
        """
        gone = departed(now) if decision.plan is None and not now.plan.is_terminal else ()
        if not gone:
            return decision
        leaving = tuple(incarnation for incarnation in now.plan.leaving if incarnation not in gone)
        return replace(decision, plan=now.plan.following(leaving=leaving))

    def _wind_up(self, now: ClusterView) -> Decision:
        """Keep the outcome readable until every live member has acknowledged it.

        After a stop, first wait until no worker of the run is left, and publish that: ``stop`` returns by it.
        """
        plan = now.plan
        waits = clearance_deadlines(now) if plan.phase is Phase.STOPPED else {}
        if waits:  # they may take longer to end than the outcome is kept
            return await_clearing(now, waits)
        if plan.phase is Phase.STOPPED and plan.uncleared:
            cleared = plan.following(uncleared=())
            return Decision("the workers of every node have exited", cleared)
        if now.clock.cleared_s is None:
            now.clock.cleared_s = now.now_s
        until_s = now.clock.cleared_s + ACK_PATIENCE_LEASES * now.policy.lease_ttl_s
        # Nodes that are to resume the stopped run: their records show that they have read the stop. A node that has
        # not read it yet may have been in the run, whatever its record contains and however late it is seen.
        next_life = (State.READY, plan.generation + 1) if plan.phase is Phase.STOPPED else None
        newcomers = [
            node for node in now.by_node.values() if (node.member.state, node.member.generation) == next_life
        ]
        alive = [node for node in now.by_node.values() if node not in newcomers]
        if alive and now.now_s < until_s:
            reason = f"the run is over; waiting for {node_names(alive)} to acknowledge"
            return Decision(reason, wake_s=until_s)
        if newcomers:
            policy = newcomers[0].member.policy.covering(plan)  # nodes of the run may yet come back
            fresh = Plan(RECORD_VERSION, plan.version + 1, Phase.FORMING, 1, "", policy)
            fresh = msgspec.structs.replace(fresh, acknowledged=plan.acknowledged)
            return Decision.to_publish(_next_life(fresh, plan))
        return self._over_when_fenced(now)

    @staticmethod
    def _over_when_fenced(now: ClusterView) -> Decision:
        """Let the records of a run that is over be removed when no lost node can run workers any more.

        Nothing but these records keeps the next run of this name from starting beside them.
        """
        replaced = now.ledger.replaced()
        fenced_s = {
            node.member.node_id: node.ends_s + now.policy.fence_margin_s
            for node in now.ledger.sightings.values()
            if not node.alive
            and node.member.incarnation not in replaced
            and node.member.state is not State.SUCCEEDED
            and node.member.clear <= now.plan.generation
        }
        awaited = [node_id for node_id, until_s in fenced_s.items() if now.now_s < until_s]
        if awaited:
            reason = f"the run is over; waiting until no worker of {names(awaited)} can be left"
            return Decision(reason, wake_s=min(fenced_s[node_id] for node_id in awaited))
        return Decision("the run is over", done=True)

    def _with_housekeeping(self, decision: Decision, now_s: float) -> Decision:
        """Add what is due in any phase: the next lease to end, records that are no longer needed."""
        assert self.plan is not None  # the caller looked
        needed = {seat.incarnation for seat in self.plan.seats_at_risk}
        forget: list[str] = []
        next_end_s = FAR_S
        for key, node in self.ledger.sightings.items():
            gone = not node.alive or node.member.state is State.LEFT
            if gone and key not in needed and now_s >= node.ends_s + self.plan.policy.fence_margin_s:
                forget.append(key)
            elif node.alive:
                next_end_s = min(next_end_s, node.ends_s)
            elif key not in needed:
                next_end_s = min(next_end_s, node.ends_s + self.plan.policy.fence_margin_s)
        wake_s = now_s if len(forget) > FORGET_AT_ONCE else min(decision.wake_s, max(next_end_s, now_s))
        return replace(decision, forget=tuple(forget[:FORGET_AT_ONCE]), wake_s=wake_s)


def _failed_by(error: RecordError, known: Plan, decision: Decision) -> Decision:
    """Return, in place of a decision whose plan nodes would reject, that the run has failed because of it."""
    assert decision.plan is not None  # it was looked at
    reason = f"the run cannot continue: the next plan would be unreadable ({error})"[:LONGEST_TEXT]
    failed = Plan(RECORD_VERSION, decision.plan.version, Phase.FAILED, known.generation, reason, known.policy)
    return replace(decision, reason=reason, plan=msgspec.structs.replace(failed, charged=known.charged))


def _still_runs(node: Sighting, world: World) -> bool:
    """Return whether the node runs this world, or has succeeded in it; another store may have made one like it."""
    member = node.member
    runs = node.alive and member.state in (State.RUNNING, State.SUCCEEDED)
    return runs and member.generation == world.generation and _world_of(member) in (None, world)


def _history_it_runs(member: Member) -> Plan | None:
    """Return the node's history if it runs the world that this names."""
    world = _world_of(member)
    runs = member.state is State.RUNNING and world is not None and world.generation == member.generation
    return member.history if runs else None


def _may_run(member: Member) -> bool:
    """Return whether this node, by its history, has a seat in a world and has not stopped since."""
    world = _world_of(member)
    if world is None or world.seat_of(member.incarnation) is None:
        return False
    return member.clear <= world.generation


def _world_of(member: Member) -> World | None:
    """Return the newest world that the node knows."""
    return member.history.world if member.history is not None else None


def _above(now: ClusterView, beyond: list[Plan]) -> Decision:
    """Go above generations that have become known only now; their worlds are to be cleared as well.

    If the newest of these runs ended in order, as for the first plan of a store, no worker of it is left, and unless
    it was stopped, this is another run under its name, which has all its restarts.
    """
    plan = now.plan
    newest = max(beyond, key=lambda history: history.newness)
    policy, seats = plan.policy, {seat.incarnation: seat for seat in plan.seats_at_risk}
    for history in beyond:
        policy = policy.covering(history)
        if history.world is not None and not history.settled:
            seats |= {seat.incarnation: seat for seat in history.world.seats}
    is_later = newest.is_later_than(plan)
    another = newest.settled and newest.phase is not Phase.STOPPED
    spent = newest if is_later and newest.charged >= plan.charged and not another else plan
    known = msgspec.structs.replace(
        plan,
        policy=policy,
        generation=max(plan.generation, newest.generation),
        world=newest.world if is_later and not newest.settled else plan.world,
        uncleared=tuple(seats.values()),
        charged=spent.charged,
        budget=spent.budget,
    )
    if is_later:
        reason = f"a node reported generation {newest.generation}; the next generation is above it"
    else:
        reason = f"{node_names(seats.values())} may still be running an older generation"
    return Decision.to_publish(known.forming(reason, free=True, notice=now.carried_notice))


def _next_life(fresh: Plan, ended: Plan) -> Plan:
    """Resume a stopped run above its generation, with the restarts that it has used."""
    reason = f"resuming the run after generation {ended.generation}, in which it was stopped"
    again = msgspec.structs.replace(
        fresh,
        generation=ended.generation + 1,
        life=ended.generation + 1,
        order=ended.order,
        charged=ended.charged,
        budget=ended.budget,
        reason=reason,
    )
    return budget.not_charged(again)
