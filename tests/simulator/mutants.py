"""Deliberate bugs that directed scenarios detect (see :mod:`.directed`), to show that the checker can fail.

Each breaks one rule of the protocol or of its drivers, by replacing one attribute of a real (or simulated) class for
the time of a run, or by a quirk of the simulated store or agents. Others are in :mod:`.pure_mutants` (the table tests
of ``tests/protocol`` detect them) and in :mod:`.seeded_mutants` (random seeds do).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

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
from elastic_agent.transport import NodeRecords, plans
from elastic_agent.transport.etcd import Leadership

from . import guard
from .kernel import Routine

Patch = tuple[Any, str, Callable[[Any], Any]]
"""Whose attribute, its name, and what makes the mutant's from the right one."""


@dataclass(frozen=True)
class Mutant:
    """One deliberate bug."""

    name: str
    what: str
    patches: tuple[Patch, ...] = ()
    quirks: tuple[str, ...] = ()
    """What the simulated store and agents do wrong."""


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


def always(value: Any) -> Callable[[Any], Any]:
    """Replace a function by one that always returns this."""
    return lambda right: lambda *args, **kwargs: value


def _without_margin(right: Any) -> Any:
    def fenced_s(self: leases.LeaseLedger, incarnation: str, policy: records.Policy) -> float | None:
        at_s: float | None = right(self, incarnation, policy)
        return None if at_s is None else at_s - policy.fence_margin_s

    return fenced_s


def _charges_membership(right: Any) -> Any:
    def charge(now: cluster_view.ClusterView) -> bool:
        return now.plan.failure is not None

    return charge


def _one_more_restart(right: Any) -> Any:
    def decide(now: cluster_view.ClusterView) -> cluster_view.Decision:
        policy = now.plan.policy
        lax = msgspec.structs.replace(policy, max_restarts=policy.max_restarts + 1)
        decision: cluster_view.Decision = right(
            replace(now, plan=msgspec.structs.replace(now.plan, policy=lax))
        )
        if decision.plan is None:
            return decision
        return replace(decision, plan=msgspec.structs.replace(decision.plan, policy=policy))

    return decide


def _everybody_ready(right: Any) -> Any:
    def ready(self: cluster_view.ClusterView) -> list[leases.Sighting]:
        return [
            one
            for one in self.ledger.sightings.values()
            if one.member.state is State.READY and one.member.generation == self.plan.generation and one.alive
        ]

    return ready


def _chooses_all(right: Any) -> Any:
    def choose(now: cluster_view.ClusterView, ready: list[leases.Sighting]) -> list[leases.Sighting]:
        return ready[: now.policy.max_nodes]

    return choose


def _ready_at_once(right: Any) -> Any:
    def forming_seen(self: node.Node, plan: Plan) -> list[node.Action]:
        actions: list[node.Action] = right(self, plan)
        if self.activity is node.Activity.STOPPING:
            actions += self._announce(State.READY, plan.generation)
        return actions

    return forming_seen


def _keeps_running(right: Any) -> Any:
    def watch(self: guard.Guard) -> Routine:
        while True:
            yield self._changed, None

    return watch


def _survives_its_agent(right: Any) -> Any:
    def agent_died(self: guard.Guard) -> None:
        pass

    return agent_died


def _any_success_finishes(right: Any) -> Any:
    def succeeded(now: cluster_view.ClusterView, seat: records.Seat) -> bool:
        world = now.plan.world
        return world is not None and any(right(now, one) for one in world.seats)

    return succeeded


def _forgets_older_awaited(right: Any) -> Any:
    def forming_plan(plan: Plan, reason: str, **changes: object) -> Plan:
        made: Plan = right(plan, reason, **changes)
        return msgspec.structs.replace(made, uncleared=made.uncleared[:-1])

    return forming_plan


def _clears_at_once(right: Any) -> Any:
    def fenced_s(self: leases.LeaseLedger, incarnation: str, policy: records.Policy) -> float | None:
        known = self.sightings.get(incarnation)
        if known is None:
            return self.born_s
        acknowledged = known.alive or known.renewals_s
        at_s: float | None = right(self, incarnation, policy) if acknowledged else known.first_seen_s
        return at_s

    return fenced_s


def _takes_the_silent_for_lost(right: Any) -> Any:
    def observe(
        self: leases.LeaseLedger,
        member: records.Member,
        lease: records.Lease,
        now_s: float,
        written_s: float | None = None,
    ) -> None:
        unknown = member.incarnation not in self.sightings
        right(self, member, lease, now_s, written_s)
        if unknown and now_s < self.born_s + 0.1:
            seen = self.sightings[member.incarnation]
            self.sightings[member.incarnation] = replace(seen, renewed_s=now_s - lease.ttl_s)

    return observe


def _dates_before_the_write(right: Any) -> Any:
    def written_by(self: revisions.RevisionTimes, store: str, revision: int) -> float | None:
        known, told = self._seen
        earlier = [at_s for one, at_s in told if one < revision and store == known]
        return earlier[-1] if earlier else right(self, store, revision)  # type: ignore[no-any-return]

    return written_by


def _forms_at_once(right: Any) -> Any:
    return lambda self, decision, now_s: decision


def _dates_before_the_request(right: Any) -> Any:
    async def read(self: RunDriver, *args: Any) -> Any:
        clock, asked_s = self._clock, self._clock()
        self._clock = lambda: asked_s
        try:
            return await right(self, *args)
        finally:
            self._clock = clock

    return read


def _saves_after_publishing(right: Any) -> Any:
    async def publish(self: RunDriver, plan: Plan) -> None:
        save = self._save
        late: list[records.History] = []

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


def _saves_or_fails(right: Any) -> Any:
    async def save(self: RunDriver, history: records.History) -> None:
        await self._history_store.save(self._run_id, history)

    return save


def _reads_once(right: Any) -> Any:
    async def read_all(self: RunDriver) -> None:
        if self._coordinator.ledger.sightings:
            self._full_read_s = float("inf")
        else:
            await right(self)

    return read_all


def _begins_without_asking(right: Any) -> Any:
    async def begin_run(self: Election, leadership: Leadership) -> float:
        return self._clock() - await leadership.store_age_s()

    return begin_run


def _settles_nothing(right: Any) -> Any:
    return property(lambda self: self.plan.history() if self.plan is not None else None)


def _leads_once(right: Any) -> Any:
    async def lead(self: Election, *args: Any) -> None:
        self._over = True
        await right(self, *args)

    return lead


def _forgives_in_half_the_time(right: Any) -> Any:
    def forgiven(plan: Plan) -> records.Budget:
        rules = msgspec.structs.replace(plan.policy, restart_window_s=plan.policy.restart_window_s / 2)
        return right(msgspec.structs.replace(plan, policy=rules))  # type: ignore[no-any-return]

    return forgiven


def _keeps_the_credit(right: Any) -> Any:
    def forgiven(plan: Plan) -> records.Budget:
        return msgspec.structs.replace(right(plan), progress_s=plan.budget.progress_s)

    return forgiven


def _remembers_no_budget(right: Any) -> Any:
    def history(self: Plan, *, settled: bool = False) -> records.History:
        return msgspec.structs.replace(right(self, settled=settled), budget=records.Budget())

    return history


def _impatient(right: Any) -> Any:
    def under_notice(
        now: cluster_view.ClusterView,
        world: records.World,
        busy: list[records.Seat],
        joining: tuple[str, ...],
    ) -> cluster_view.Decision:
        some_left = any(notices.has_saved(now, seat) for seat in world.seats)
        return right(now, world, [] if some_left else busy, joining)  # type: ignore[no-any-return]

    return under_notice


def _a_notice_is_a_failure(right: Any) -> Any:
    def after_notice(*args: Any) -> cluster_view.Decision:
        decision: cluster_view.Decision = right(*args)
        assert decision.plan is not None  # a notice that is over always has a consequence
        failure = records.Failure(records.FailureKind.WORKER, "the workers left")
        plan = msgspec.structs.replace(decision.plan, failure=failure, free=False)
        return replace(decision, plan=plan)

    return after_notice


def _half_the_time(right: Any) -> Any:
    def clock_of(plan: Plan, before: Any, now_s: float, *, new_phase: bool) -> cluster_view.PhaseClock:
        known = before.notice
        clock: cluster_view.PhaseClock = right.__func__(
            cluster_view.PhaseClock, plan, before, now_s, new_phase=new_phase
        )
        if plan.notice is not None and clock.notice != known:
            clock.notice_ends_s -= plan.notice.left_s / 2
        return clock

    return staticmethod(clock_of)


def _does_not_stop(right: Any) -> Any:
    def follow(
        now: cluster_view.ClusterView, plan: Plan, requester: str, stop_request: records.StopRequest
    ) -> Plan:
        return plan if stop_request.leaver is None else right(now, plan, requester, stop_request)

    return follow


def _leaves_the_end_to_the_asker(right: Any) -> Any:
    def store_replaced(self: node.Node) -> list[node.Action]:
        self._end_known = None
        said: list[node.Action] = right(self)
        return said

    return store_replaced


def _any_size(right: Any) -> Any:
    def fit(self: records.Policy, nodes: int) -> int:
        size = min(nodes, self.max_nodes)
        return size if size >= self.min_nodes else 0

    return fit


def _counts_from_the_answer(right: Any) -> Any:
    def hold(self: Session, held: leases.HeldLease, sent_s: float) -> float:
        late = leases.HeldLease.granted(held.record, self._clock())
        return right(self, late, sent_s)  # type: ignore[no-any-return]

    return hold


def _goes_on_counting_versions(right: Any) -> Any:
    def connected(self: Session, commands: NodeRecords) -> None:
        version = self._read_version
        right(self, commands)
        self._read_version = version

    return connected


def _does_not_retell(right: Any) -> Any:
    def rejoin(self: Session, incarnation: str) -> None:
        right(self, incarnation)
        self._retell = False

    return rejoin


def _closes_all(right: Any) -> Any:
    def keep_only(self: BootstrapOffers, world: records.World) -> None:
        self.close()

    return keep_only


def _renews_whatever_is_there(right: Any) -> Any:
    async def renew(self: NodeRecords, expected: records.Lease, renewed: records.Lease) -> bool:
        await self._table.put(self._keys.lease(expected.incarnation), encode(renewed))
        return True

    return renew


def _overwrites(right: Any) -> Any:
    async def publish(self: plans.PlanWriter, plan: Plan) -> None:
        envelope, parts = plans._pack(plan)
        stored = {self._keys.parts + digest: body for digest, body in parts.items()}
        stored[self._keys.plan(plan.version)] = msgspec.json.encode(envelope)
        stored[self._keys.latest] = str(plan.version).encode()
        for key, value in stored.items():
            await self._table.put(key, value)
        self._reader.published(plan)

    return publish


def _any_requeuer(right: Any) -> Any:
    def stopped(now: cluster_view.ClusterView, plan: Plan, notice: records.Notice) -> Plan:
        return msgspec.structs.replace(right(now, plan, notice), requeuer=min(now.ledger.sightings))

    return stopped


def _revokes_first(right: Any) -> Any:
    def unknown_worlds(
        self: coordinator.Coordinator, now: cluster_view.ClusterView
    ) -> cluster_view.Decision | None:
        return None if self._overdue(now.now_s) else right(self, now)

    return unknown_worlds


_ALL = (
    Mutant(
        "clears-no-unknown-world",
        "a world that a node runs and reports is not cleared if the coordinator's disk has the history of another run",
        ((coordinator.Coordinator, "_unknown_worlds", always(None)),),
    ),
    Mutant(
        "revokes-before-clearing",
        "a node whose lease has ended is revoked before its world is among those to be cleared",
        ((coordinator.Coordinator, "_unknown_worlds", _revokes_first),),
    ),
    Mutant(
        "any-requeuer",
        "a node that is gone may be selected to requeue a stopped run",
        ((notices, "stopped", _any_requeuer), (forming, "stopped", _any_requeuer)),
    ),
    Mutant(
        "forgives-early",
        "failures are forgiven after half of the window",
        ((budget, "_forgiven", _forgives_in_half_the_time),),
    ),
    Mutant(
        "forgives-twice",
        "the same progress forgives one failure after the other",
        ((budget, "_forgiven", _keeps_the_credit),),
    ),
    Mutant("saves-credit", "progress made before a failure forgives it", ((budget, "_most_s", always(1e9)),)),
    Mutant(
        "counts-anything",
        "a generation that failed at once made progress",
        ((budget, "_made_progress", always(True)),),
    ),
    Mutant(
        "counts-nothing",
        "the progress of a generation is not counted",
        (
            (budget, "_progress_s", lambda right: lambda now, plan: plan.budget.progress_s),
            (budget, "write_at_s", always(float("inf"))),
        ),
    ),
    Mutant(
        "loses-forgiveness",
        "a new store has the charged failures, but not the forgiven ones",
        ((Plan, "history", _remembers_no_budget),),
    ),
    Mutant(
        "never-gives-up",
        "a failure that repeats is tried again and again",
        ((budget, "repeats", always(False)),),
    ),
    Mutant(
        "gives-up-at-once",
        "a failure before any progress ends the run without a retry",
        ((budget, "repeats", lambda right: lambda plan: plan.failure and plan.failure.signature),),
    ),
    Mutant(
        "unknown-counts-as-same",
        "two failures without a signature count as the same one",
        ((budget, "repeats", lambda right: lambda plan: plan.failure.signature == plan.budget.signature),),
    ),
    Mutant(
        "repeats-across-worlds",
        "a failure repeats one before which another world ran",
        ((budget, "not_charged", lambda right: lambda plan: plan),),
    ),
    Mutant(
        "never-pauses",
        "the restarts of a crash loop follow each other at once",
        ((budget, "pause_s", always(0.0)),),
    ),
    Mutant(
        "drops-the-stop",
        "the next generation of a run that is to end gets no notice",
        ((running, "carried", always(None)),),
    ),
    Mutant(
        "only-requester-repeats-stop",
        "in a new store only the requesting node repeats the stop request",
        ((node.Node, "store_replaced", _leaves_the_end_to_the_asker),),
    ),
    Mutant(
        "does-not-wait-for-all",
        "the next world forms when the first workers have left",
        ((running, "decide_under_notice", _impatient),),
    ),
    Mutant(
        "charges-a-notice",
        "workers that left after a notice are charged as a failure",
        ((notices, "after_notice", _a_notice_is_a_failure),),
    ),
    Mutant(
        "half-the-time",
        "workers are stopped when half of the notice's time is over",
        ((cluster_view.PhaseClock, "of", _half_the_time),),
    ),
    Mutant(
        "delivers-no-notice",
        "a node does not deliver notices to its workers",
        ((node.Node, "_notify", always([])),),
    ),
    Mutant(
        "does-not-stop",
        "a stop request is acknowledged, and nothing follows",
        ((notices, "_follow", _does_not_stop),),
    ),
    Mutant(
        "any-leaver-stops",
        "a run is stopped when a node leaves, although others could continue it",
        ((notices, "_leaves_none", always(True)),),
    ),
    Mutant(
        "does-not-leave",
        "a node without an answer to its request does not leave",
        ((node.Node, "leave_now", always([])),),
    ),
    Mutant(
        "resumes-too-early",
        "a stopped run is resumed at once, while workers of it are still being stopped",
        (
            (coordinator.Coordinator, "_still_stopping", always({})),
            (coordinator, "ACK_PATIENCE_LEASES", lambda right: 0.0),
        ),
    ),
    Mutant(
        "any-size", "worlds of sizes that are not allowed are sealed", ((records.Policy, "fit", _any_size),)
    ),
    Mutant(
        "keeps-plan-version",
        "in a new store a node waits for a plan with a higher version than the last store's",
        ((Session, "_connected", _goes_on_counting_versions),),
    ),
    Mutant(
        "plan-not-redelivered",
        "the plan that the node has read before is not delivered to a new incarnation",
        ((Session, "rejoin", _does_not_retell),),
    ),
    Mutant(
        "reports-no-history",
        "a node does not report its history to a store with less history",
        ((Session, "_knows_more_than", always(False)),),
    ),
    Mutant(
        "renews-over-the-fence",
        "a renewal that is answered late counts although the guard has killed the workers",
        ((Session, "fenced", always(None)),),
    ),
    Mutant(
        "closes-the-needed-store",
        "a node stops serving the bootstrap store of the world that is about to start",
        ((BootstrapOffers, "keep_only", _closes_all),),
    ),
    Mutant(
        "seals-uncleared",
        "the coordinator seals a generation without waiting for the previous one to be cleared",
        ((forming, "clearance_deadlines", always({})),),
    ),
    Mutant(
        "offers-once",
        "a node that could not offer a bootstrap store does not try again",
        ((Session, "_may_offer_again", always(False)),),
    ),
    Mutant(
        "omits-uncleared-seat",
        "a forming plan leaves one seat of the previous world out of those to be cleared",
        (
            (forming, "forming_plan", _forgets_older_awaited),
            (running, "forming_plan", _forgets_older_awaited),
        ),
    ),
    Mutant(
        "no-margin",
        "the coordinator ignores the fence margin",
        ((leases.LeaseLedger, "fenced_s", _without_margin),),
    ),
    Mutant(
        "charges-membership",
        "a failure is charged although a participant was lost",
        ((forming, "_charge", _charges_membership),),
    ),
    Mutant(
        "budget-off-by-one",
        "one restart more than allowed",
        ((coordinator, "decide_forming", _one_more_restart),),
    ),
    Mutant("never-charges", "no failure is ever charged", ((forming, "_charge", always(False)),)),
    Mutant(
        "two-seats",
        "every incarnation of a node may get a seat",
        ((cluster_view.ClusterView, "ready", _everybody_ready), (forming, "_choose", _chooses_all)),
    ),
    Mutant(
        "generation-reused",
        "a new store begins at generation 1 again, whatever is remembered",
        ((coordinator.Coordinator, "_newest_history", always(None)),),
    ),
    Mutant(
        "ready-before-stopped",
        "a node publishes ready while its workers are still being stopped",
        ((node.Node, "_forming", _ready_at_once),),
    ),
    Mutant(
        "ignores-lost-lease",
        "a node goes on with an incarnation whose lease is lost",
        ((node.Node, "lease_lost", always([])),),
    ),
    Mutant(
        "finishes-early",
        "the run is finished when the first node succeeded",
        ((running, "_succeeded", _any_success_finishes),),
    ),
    Mutant(
        "renews-revoked",
        "a revoked lease can be renewed",
        ((NodeRecords, "renew", _renews_whatever_is_there),),
    ),
    Mutant(
        "deadline-from-reply",
        "the node's deadline counts from the answer to a renewal",
        ((Session, "_hold", _counts_from_the_answer),),
    ),
    Mutant(
        "deadline-from-last-attempt",
        "the node's deadline counts from the last attempt of a renewal that was repeated",
        ((leases.FirstSent, "of", lambda right: lambda self, what, now_s: now_s),),
    ),
    Mutant(
        "time-before-the-read",
        "the coordinator dates what it reads by the time before its request",
        (
            (RunDriver, "_read", _dates_before_the_request),
            (RunDriver, "_read_leases", _dates_before_the_request),
        ),
    ),
    Mutant(
        "blind-publish",
        "the coordinator publishes without compare-and-set",
        ((plans.PlanWriter, "publish", _overwrites),),
    ),
    Mutant(
        "saves-after-publishing",
        "the coordinator writes a generation to its disk only after publishing it",
        ((RunDriver, "_publish", _saves_after_publishing),),
    ),
    Mutant(
        "needs-its-disk",
        "the coordinator ends when its disk cannot be written",
        ((RunDriver, "_save", _saves_or_fails),),
    ),
    Mutant(
        "claims-without-proof",
        "a restarted agent claims that its old workers are gone without looking",
        quirks=("no proof",),
    ),
    Mutant(
        "guard-ignores-deadline",
        "the guard does not kill at the deadline",
        ((guard.Guard, "_watch", _keeps_running),),
    ),
    Mutant(
        "guard-outlives-agent",
        "the guard lets the workers run when its agent dies",
        ((guard.Guard, "agent_died", _survives_its_agent),),
    ),
    Mutant(
        "former-leader-writes",
        "the coordinator's writes do not compare the leader key",
        quirks=("former leader writes",),
    ),
    Mutant(
        "takeover-clears-at-once",
        "a new coordinator counts unregistered nodes as cleared",
        ((leases.LeaseLedger, "fenced_s", _clears_at_once),),
    ),
    Mutant(
        "takeover-revokes",
        "a new coordinator counts the time before its term as time without renewals",
        ((leases.LeaseLedger, "observe", _takes_the_silent_for_lost),),
    ),
    Mutant(
        "dates-before-the-write",
        "a new coordinator dates a lease by the last answer that came before it was written",
        ((revisions.RevisionTimes, "written_by", _dates_before_the_write),),
    ),
    Mutant(
        "ignores-unregistered-nodes",
        "in an etcd that lost its data a world forms before the nodes of the last one have registered or are fenced",
        ((coordinator.Coordinator, "_alone", _forms_at_once),),
    ),
    Mutant(
        "stays-below",
        "a later generation of which a node tells is not gone above",
        ((coordinator.Coordinator, "_higher_history", always(None)),),
    ),
    Mutant(
        "accepts-duplicate-ids",
        "a second agent with the id of a live node is not refused",
        ((coordinator.Coordinator, "_refusals", always(None)),),
    ),
    Mutant(
        "forgets-how-it-ended",
        "a run begins without a look at how the last one of its name ended in this etcd",
        ((Election, "_begin_run", _begins_without_asking),),
    ),
    Mutant(
        "settles-nothing",
        "that every node knew the outcome is not written down",
        ((RunDriver, "_settled_history", _settles_nothing),),
    ),
    Mutant(
        "leads-once",
        "an agent that lost its leadership takes no part in elections any more",
        ((Election, "_lead", _leads_once),),
    ),
    Mutant(
        "ignores-gaps",
        "a new coordinator's news are all it takes in: nothing is read again",
        ((RunDriver, "_read_all", _reads_once),),
    ),
)

MUTANTS = {mutant.name: mutant for mutant in _ALL}
