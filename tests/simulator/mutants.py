"""Deliberate bugs that directed scenarios detect (see :mod:`.directed`), to show that the checker can fail.

Each breaks one rule of the protocol or of its drivers, by replacing one attribute of a real (or simulated) class for
the time of a run, or by a quirk of the simulated store or agents. Others are in :mod:`.pure_mutants` (the table tests
of ``tests/protocol`` detect them) and in :mod:`.seeded_mutants` (random seeds do).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import msgspec

from elastic_agent.protocol import (
    budget,
    cluster_view,
    coordinator,
    encode,
    forming,
    leases,
    node,
    notices,
    records,
    revisions,
    running,
)
from elastic_agent.protocol.records import Plan, State
from elastic_agent.rendezvous.backends.etcd.election import Election
from elastic_agent.rendezvous.bootstrap_offers import BootstrapOffers
from elastic_agent.rendezvous.coordinator_driver import RunDriver
from elastic_agent.rendezvous.session import Session
from elastic_agent.transport import NodeRecords
from elastic_agent.transport.etcd import Leadership

from . import guard
from .kernel import Routine

Change: TypeAlias = Callable[[Any], Any]
"""Makes a mutant's attribute from the right one."""
Patch: TypeAlias = tuple[Any, str, Change]
"""Whose attribute, its name, and the change."""

edited = msgspec.structs.replace


@dataclass(frozen=True)
class Mutant:
    """One deliberate bug."""

    name: str
    what: str
    patches: tuple[Patch, ...] = ()
    quirks: tuple[str, ...] = ()
    """What the simulated store and agents do wrong."""


class Mutants(dict[str, Mutant]):
    """Deliberate bugs by name."""

    def add(self, name: str, what: str, *patches: Patch, quirks: tuple[str, ...] = ()) -> None:
        """Enter one."""
        self[name] = Mutant(name, what, patches, quirks)

    def change(self, what: str, *of: tuple[Any, str]) -> Callable[[Change], Change]:
        """Enter the decorated function as the change of these attributes; the bug has its name."""

        def enter(change: Change) -> Change:
            name = change.__name__.replace("_", "-")
            self.add(name, what, *((where, attribute, change) for where, attribute in of))
            return change

        return enter


@contextmanager
def applied(mutant: Mutant | None) -> Iterator[tuple[str, ...]]:
    """The real classes with this bug in them, for a while; the quirks of the drivers."""
    if mutant is None:
        yield ()
        return
    saved = [(where, name, where.__dict__[name]) for where, name, _ in mutant.patches]
    for where, name, change in mutant.patches:
        setattr(where, name, change(where.__dict__[name]))
    try:
        yield mutant.quirks
    finally:
        for where, name, right in saved:
            setattr(where, name, right)


def always(value: Any) -> Change:
    """Replace a function by one that always returns this."""
    return lambda right: lambda *args, **kwargs: value


MUTANTS = Mutants()
add, change = MUTANTS.add, MUTANTS.change

# -- leases, fences and worlds ----------------------------------------------------------------------

add("seals-uncleared", "a generation is sealed uncleared", (forming, "clearance_deadlines", always({})))
add("ignores-lost-lease", "a node with a lost lease goes on", (node.Node, "lease_lost", always([])))
add("renews-over-the-fence", "workers killed by the guard are renewed", (Session, "fenced", always(None)))
add(
    "claims-without-proof",
    "a restarted agent claims without proof that its old workers are gone",
    quirks=("no proof",),
)


@change("the coordinator ignores the fence margin", (leases.LeaseLedger, "fenced_s"))
def no_margin(right: Any) -> Any:
    def fenced_s(self: leases.LeaseLedger, incarnation: str, policy: records.Policy) -> float | None:
        at_s: float | None = right(self, incarnation, policy)
        return None if at_s is None else at_s - policy.fence_margin_s

    return fenced_s


@change("the guard does not kill at the deadline", (guard.Guard, "_watch"))
def guard_ignores_deadline(right: Any) -> Any:
    def watch(self: guard.Guard) -> Routine:
        while True:
            yield self._changed, None

    return watch


add("guard-outlives-agent", "workers outlive their agent", (guard.Guard, "agent_died", always(None)))


@change(
    "a forming plan leaves one seat of the previous world out of those to be cleared",
    (forming, "forming_plan"),
    (running, "forming_plan"),
)
def omits_uncleared_seat(right: Any) -> Any:
    def forming_plan(*args: Any, **changes: object) -> Plan:
        made: Plan = right(*args, **changes)
        return edited(made, uncleared=made.uncleared[:-1])

    return forming_plan


def _ready_incarnations(right: Any) -> Any:
    return lambda self: [
        sighting
        for sighting in self.ledger.sightings.values()
        if (sighting.member.state, sighting.member.generation) == (State.READY, self.plan.generation)
        and sighting.alive
    ]


add(
    "two-seats",
    "every incarnation of a node may get a seat",
    (cluster_view.ClusterView, "ready", _ready_incarnations),
    (forming, "_choose", lambda right: lambda now, ready: ready[: now.policy.max_nodes]),
)


@change("the node's deadline counts from the answer to a renewal", (Session, "_hold"))
def deadline_from_reply(right: Any) -> Any:
    return lambda self, held, sent_s: right(
        self, leases.HeldLease.granted(held.record, self._clock()), sent_s
    )


@change(
    "the node's deadline counts from the last attempt of a renewal that was repeated",
    (leases.FirstSent, "of"),
)
def deadline_from_last_attempt(right: Any) -> Any:
    return lambda self, attempted, now_s: now_s


@change("a revoked lease can be renewed", (NodeRecords, "renew"))
def renews_revoked(right: Any) -> Any:
    async def renew(self: NodeRecords, expected: records.Lease, renewed: records.Lease) -> bool:
        await self._table.put(self._keys.lease(expected.incarnation), encode(renewed))
        return True

    return renew


@change("worlds of sizes that are not allowed are sealed", (records.Policy, "fit"))
def any_size(right: Any) -> Any:
    return lambda self, nodes: size if (size := min(nodes, self.max_nodes)) >= self.min_nodes else 0


@change("a node publishes ready while its workers are still being stopped", (node.Node, "_forming"))
def ready_before_stopped(right: Any) -> Any:
    def forming_seen(self: node.Node, plan: Plan) -> list[node.Action]:
        actions: list[node.Action] = right(self, plan)
        if self.activity is node.Activity.STOPPING:
            actions += self._announce(State.READY, plan.generation)
        return actions

    return forming_seen


@change("the run is finished when the first node succeeded", (running, "_succeeded"))
def finishes_early(right: Any) -> Any:
    return lambda now, seat: (
        now.plan.world is not None and any(right(now, each) for each in now.plan.world.seats)
    )


add(
    "accepts-duplicate-ids",
    "no second agent is refused",
    (coordinator.Coordinator, "_refusals", always(None)),
)

# -- the store, its coordinator and the disk --------------------------------------------------------

add(
    "generation-reused", "a new store begins at 1", (coordinator.Coordinator, "_newest_history", always(None))
)
add("reports-no-history", "a node reports no history", (Session, "_knows_more_than", always(False)))
add("offers-once", "a failed offer is not tried again", (Session, "_may_offer_again", always(False)))
add("former-leader-writes", "no write compares the leader key", quirks=("former leader writes",))
add(
    "stays-below",
    "no later generation is gone above",
    (coordinator.Coordinator, "_higher_history", always(None)),
)
add(
    "clears-no-unknown-world",
    "a world that a node runs and reports is not cleared if the coordinator's disk has the history of another run",
    (coordinator.Coordinator, "_unknown_worlds", always(None)),
)


@change("a node is revoked before its world is to be cleared", (coordinator.Coordinator, "_unknown_worlds"))
def revokes_before_clearing(right: Any) -> Any:
    return lambda self, now: None if self._overdue(now.now_s) else right(self, now)


@change("in a new store a node waits for a version above the last store's", (Session, "_connected"))
def keeps_plan_version(right: Any) -> Any:
    def connected(self: Session, commands: NodeRecords) -> None:
        version = self._read_version
        right(self, commands)
        self._read_version = version

    return connected


@change("the plan that the node has read before is not delivered to a new incarnation", (Session, "rejoin"))
def plan_not_redelivered(right: Any) -> Any:
    def rejoin(self: Session, incarnation: str) -> None:
        right(self, incarnation)
        self._retell = False

    return rejoin


@change("a node stops serving the bootstrap store of the next world", (BootstrapOffers, "keep_only"))
def closes_the_needed_store(right: Any) -> Any:
    return lambda self, world: self.close()


@change("the coordinator writes a generation to its disk only after publishing it", (RunDriver, "_publish"))
def saves_after_publishing(right: Any) -> Any:
    async def publish(self: RunDriver, plan: Plan) -> None:
        save, late = self._save, list[records.History]()

        async def later(history: records.History) -> None:
            late.append(history)

        self._save = later  # type: ignore[method-assign]
        try:
            await right(self, plan)
        finally:
            self._save = save  # type: ignore[method-assign]
        for history in late:
            await save(history)

    return publish


@change("the coordinator ends when its disk cannot be written", (RunDriver, "_save"))
def needs_its_disk(right: Any) -> Any:
    return lambda self, history: self._history_store.save(self._run_id, history)


@change(
    "the coordinator dates what it reads by the time before its request",
    (RunDriver, "_read"),
    (RunDriver, "_read_leases"),
)
def time_before_the_read(right: Any) -> Any:
    async def read(self: RunDriver, *args: Any) -> Any:
        clock, asked_s = self._clock, self._clock()
        self._clock = lambda: asked_s
        try:
            return await right(self, *args)
        finally:
            self._clock = clock

    return read


@change("a new coordinator's news are all it takes in: nothing is read again", (RunDriver, "_read_all"))
def ignores_gaps(right: Any) -> Any:
    async def read_all(self: RunDriver) -> None:
        if self._coordinator.ledger.sightings:
            self._full_read_s = float("inf")
        else:
            await right(self)

    return read_all


@change("that every node knew the outcome is not written down", (RunDriver, "_settled_history"))
def settles_nothing(right: Any) -> Any:
    return property(lambda self: self.plan.history() if self.plan is not None else None)


@change("a run begins without a look at how the last one of its name ended", (Election, "_begin_run"))
def forgets_how_it_ended(right: Any) -> Any:
    async def begin_run(self: Election, leadership: Leadership) -> float:
        return self._clock() - await leadership.store_age_s()

    return begin_run


@change("an agent that lost its leadership takes no part in elections any more", (Election, "_lead"))
def leads_once(right: Any) -> Any:
    async def lead(self: Election, *args: Any) -> None:
        self._over = True
        await right(self, *args)

    return lead


@change("a new coordinator counts unregistered nodes as cleared", (leases.LeaseLedger, "fenced_s"))
def takeover_clears_at_once(right: Any) -> Any:
    def fenced_s(self: leases.LeaseLedger, incarnation: str, policy: records.Policy) -> float | None:
        known = self.sightings.get(incarnation)
        if known is None:
            return self.born_s
        acknowledged = known.alive or known.renewals_s
        at_s: float | None = right(self, incarnation, policy) if acknowledged else known.first_seen_s
        return at_s

    return fenced_s


@change("a new coordinator counts the time before its term as silence", (leases.LeaseLedger, "observe"))
def takeover_revokes(right: Any) -> Any:
    def observe(
        self: leases.LeaseLedger, member: records.Member, lease: records.Lease, now_s: float, *args: Any
    ) -> None:
        unknown = member.incarnation not in self.sightings
        right(self, member, lease, now_s, *args)
        if unknown and now_s < self.born_s + 0.1:
            seen = self.sightings[member.incarnation]
            self.sightings[member.incarnation] = replace(seen, renewed_s=now_s - lease.ttl_s)

    return observe


@change(
    "a new coordinator dates a lease by the last answer before its write",
    (revisions.RevisionTimes, "written_by"),
)
def dates_before_the_write(right: Any) -> Any:
    def written_by(self: revisions.RevisionTimes, store: str, revision: int) -> Any:
        known, told = self._seen
        earlier = [at_s for seen, at_s in told if seen < revision and store == known]
        return earlier[-1] if earlier else right(self, store, revision)

    return written_by


@change(
    "in an etcd that lost its data a world forms before the nodes of the last one have registered or are fenced",
    (coordinator.Coordinator, "_alone"),
)
def ignores_unregistered_nodes(right: Any) -> Any:
    return lambda self, decision, now_s: decision


# -- the budget -------------------------------------------------------------------------------------

add("saves-credit", "progress made before a failure forgives it", (budget, "_most_s", always(1e9)))
add(
    "counts-anything",
    "a generation that failed at once made progress",
    (budget, "_made_progress", always(True)),
)
add("never-gives-up", "a failure that repeats is tried again and again", (budget, "repeats", always(False)))
add(
    "never-pauses", "the restarts of a crash loop follow each other at once", (budget, "pause_s", always(0.0))
)
add("never-charges", "no failure is ever charged", (forming, "_charge", always(False)))
add(
    "counts-nothing",
    "the progress of a generation is not counted",
    (budget, "_progress_s", lambda right: lambda now, plan: plan.budget.progress_s),
    (budget, "write_at_s", always(float("inf"))),
)


@change("failures are forgiven after half of the window", (budget, "_forgiven"))
def forgives_early(right: Any) -> Any:
    def forgiven(plan: Plan) -> Any:
        rules = edited(plan.policy, restart_window_s=plan.policy.restart_window_s / 2)
        return right(edited(plan, policy=rules))

    return forgiven


@change("the same progress forgives one failure after the other", (budget, "_forgiven"))
def forgives_twice(right: Any) -> Any:
    return lambda plan: edited(right(plan), progress_s=plan.budget.progress_s)


@change("a new store has the charged failures, but not the forgiven ones", (Plan, "history"))
def loses_forgiveness(right: Any) -> Any:
    return lambda self, **how: edited(right(self, **how), budget=records.Budget())


@change("a failure before any progress ends the run without a retry", (budget, "repeats"))
def gives_up_at_once(right: Any) -> Any:
    return lambda plan: plan.failure and plan.failure.signature


@change("two failures without a signature count as the same one", (budget, "repeats"))
def unknown_counts_as_same(right: Any) -> Any:
    return lambda plan: plan.failure.signature == plan.budget.signature


@change("a failure repeats one before which another world ran", (budget, "not_charged"))
def repeats_across_worlds(right: Any) -> Any:
    return lambda plan: plan


@change("a failure is charged although a participant was lost", (forming, "_charge"))
def charges_membership(right: Any) -> Any:
    return lambda now: now.plan.failure is not None


@change("one restart more than allowed", (coordinator, "decide_forming"))
def budget_off_by_one(right: Any) -> Any:
    def decide(now: cluster_view.ClusterView) -> cluster_view.Decision:
        policy = now.plan.policy
        lax = edited(policy, max_restarts=policy.max_restarts + 1)
        decision: cluster_view.Decision = right(replace(now, plan=edited(now.plan, policy=lax)))
        if decision.plan is None:
            return decision
        return replace(decision, plan=edited(decision.plan, policy=policy))

    return decide


# -- notices ----------------------------------------------------------------------------------------

add(
    "drops-the-stop",
    "the next generation of a run that is to end gets no notice",
    (running, "carried", always(None)),
)
add(
    "delivers-no-notice", "a node does not deliver notices to its workers", (node.Node, "_notify", always([]))
)
add(
    "any-leaver-stops",
    "a node that leaves stops a run that could go on",
    (notices, "_leaves_none", always(True)),
)
add("does-not-leave", "a node without an answer does not leave", (node.Node, "leave_now", always([])))
add(
    "resumes-too-early",
    "a stopped run is resumed at once, while workers of it are still being stopped",
    (coordinator.Coordinator, "_still_stopping", always({})),
    (coordinator, "ACK_PATIENCE_LEASES", lambda right: 0.0),
)


@change(
    "a node that is gone may be selected to requeue a stopped run", (notices, "stopped"), (forming, "stopped")
)
def any_requeuer(right: Any) -> Any:
    return lambda now, plan, notice: edited(right(now, plan, notice), requeuer=min(now.ledger.sightings))


@change("in a new store only the requesting node repeats the stop request", (node.Node, "store_replaced"))
def only_requester_repeats_stop(right: Any) -> Any:
    def store_replaced(self: node.Node) -> Any:
        self._end_known = None
        return right(self)

    return store_replaced


@change("the next world forms when the first workers have left", (running, "decide_under_notice"))
def does_not_wait_for_all(right: Any) -> Any:
    def under_notice(
        now: Any, world: records.World, busy: list[records.Seat], joining: tuple[str, ...]
    ) -> Any:
        some_left = any(notices.has_saved(now, seat) for seat in world.seats)
        return right(now, world, [] if some_left else busy, joining)

    return under_notice


@change("workers that left after a notice are charged as a failure", (notices, "after_notice"))
def charges_a_notice(right: Any) -> Any:
    def after_notice(*args: Any) -> cluster_view.Decision:
        decision: cluster_view.Decision = right(*args)
        assert decision.plan is not None  # a notice that is over always has a consequence
        failure = records.Failure(records.FailureKind.WORKER, "the workers left")
        return replace(decision, plan=edited(decision.plan, failure=failure, free=False))

    return after_notice


@change("workers are stopped when half of the notice's time is over", (cluster_view.PhaseClock, "of"))
def half_the_time(right: Any) -> Any:
    def clock_of(plan: Plan, before: Any, now_s: float, **how: bool) -> cluster_view.PhaseClock:
        known = before.notice
        clock: cluster_view.PhaseClock = right.__func__(cluster_view.PhaseClock, plan, before, now_s, **how)
        if plan.notice is not None and clock.notice != known:
            clock.notice_ends_s -= plan.notice.left_s / 2
        return clock

    return staticmethod(clock_of)


@change("a stop request is acknowledged, and nothing follows", (notices, "_follow"))
def does_not_stop(right: Any) -> Any:
    return lambda now, plan, requester, stop_request: (
        plan if stop_request.leaver is None else right(now, plan, requester, stop_request)
    )
