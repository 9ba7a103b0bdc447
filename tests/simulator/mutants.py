"""Deliberate bugs, to show that the checker can fail.

Each breaks one rule of the protocol or of its drivers, by replacing one attribute of a real (or simulated)
class for the time of a seed, or by a quirk that the simulated drivers know. The checker must catch every one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from elastic_agent.protocol import (
    budget,
    cluster_view,
    coordinator,
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
from elastic_agent.rendezvous.coordinator_effects import SaveHistory
from elastic_agent.rendezvous.effects import Steps
from elastic_agent.rendezvous.node_session import NodeSession
from elastic_agent.rendezvous.run_history import RunHistoryStore
from elastic_agent.rendezvous.store_requests import Connection
from elastic_agent.transport import sealed_records, sealing
from elastic_agent.transport.c10d import plans, sealed
from elastic_agent.transport.etcd import leadership, link
from elastic_agent.transport.etcd.sealed import RunSecret

from . import guard, keyed
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
    focus: tuple[str, ...] = ()
    """The faults that it takes to see it, if it takes luck otherwise."""
    hosting: str | None = None
    """Where the store lives, if that is not to be drawn."""
    forged: bool = False
    """Whether the run is authenticated, and another client writes into its store."""
    seeds: int = 400
    """Within how many seeds it must be caught."""
    first: int = 0
    """The first of these seeds: where luck takes many, one that has it by the present scenarios."""


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


def _always(value: Any) -> Callable[[Any], Any]:
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


def _launches_always(right: Any) -> Any:
    return lambda self: True


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


def _overlooks_revocation(right: Any) -> Any:
    def observe(
        self: leases.LeaseLedger, member: records.Member, lease: records.Lease, *times_s: float | None
    ) -> None:
        right(self, member, msgspec.structs.replace(lease, revoked=False), *times_s)

    return observe


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


def _takes_any_etcd_for_the_same(right: Any) -> Any:
    return lambda self, store, *args: right(self, "etcd", *args)


def _above_intentions(right: Any) -> Any:
    def higher(self: coordinator.Coordinator) -> records.History | None:
        newest = self._newest_history()
        if newest is None or self.plan is None or newest.generation <= self.plan.generation:
            return None
        return newest

    return higher


def _clears_the_reported_world_alone(right: Any) -> Any:
    def above(now: cluster_view.ClusterView, history: records.History) -> cluster_view.Decision:
        if history.settled:
            return right(now, history)  # type: ignore[no-any-return]
        plan = msgspec.structs.replace(now.plan, world=None, uncleared=())
        return right(replace(now, plan=plan), history)  # type: ignore[no-any-return]

    return staticmethod(above)


def _unknown_is_present(right: Any) -> Any:
    def departed(now: cluster_view.ClusterView, incarnation: str) -> bool:
        return incarnation in now.ledger.sightings and right(now, incarnation)

    return departed


def _forms_at_once(right: Any) -> Any:
    return lambda self, decision, now_s: decision


def _gapped_ranks(right: Any) -> Any:
    def seat_members(ordered: Any) -> tuple[records.Seat, ...]:
        seats: tuple[records.Seat, ...] = right(ordered)
        last = msgspec.structs.replace(seats[-1], first_rank=seats[-1].first_rank + (len(seats) > 1))
        return (*seats[:-1], last)

    return seat_members


def _highest_generation_first_told(right: Any) -> Any:
    def newest(self: coordinator.Coordinator) -> records.History | None:
        return max(self._histories(), key=lambda one: one.generation, default=None)

    return newest


def _the_youngest_first(right: Any) -> Any:
    def precedes(one: leases.Sighting, other: leases.Sighting, seated: set[str]) -> bool:
        succeeds = one.member.incarnation in other.member.replaces or (
            other.member.incarnation in one.member.replaces
        )
        return right(one, other, seated) if succeeds else right(other, one, seated)  # type: ignore[no-any-return]

    return precedes


def _ignores_seats(right: Any) -> Any:
    return lambda one, other, seated: right(one, other, set())


def _only_with_workers(right: Any) -> Any:
    def concerns_others(self: node.Node) -> bool:
        return self.activity in (node.Activity.STARTING, node.Activity.RUNNING)

    return property(concerns_others)


# -- the coordinator's driver --------------------------------------------------------------------


def _dates_before_the_request(right: Any) -> Any:
    def read(self: RunDriver, *args: Any) -> Steps[Any]:
        clock, asked_s = self._clock, self._clock()
        self._clock = lambda: asked_s
        try:
            return (yield from right(self, *args))
        finally:
            self._clock = clock

    return read


def _saves_after_publishing(right: Any) -> Any:
    def publish(self: RunDriver, plan: Plan) -> Steps[bool]:
        late: list[SaveHistory] = []
        steps = right(self, plan)
        effect = next(steps)
        while True:
            if isinstance(effect, SaveHistory):
                late.append(effect)
                answer = None
            else:
                answer = yield effect
                yield from late  # type: ignore[misc]
                late.clear()
            try:
                effect = steps.send(answer)
            except StopIteration as end:
                return bool(end.value)

    return publish


def _last_call_is_written(right: Any) -> Any:
    def save_soon(self: RunHistoryStore, run_id: str, history: records.History) -> Future[None]:
        return self._disk.submit(f"save {run_id}", lambda: self._write(run_id, history))

    return save_soon


def _saves_or_fails(right: Any) -> Any:
    def save(self: RunDriver, history: records.History) -> Steps[None]:
        yield from SaveHistory(history)

    return save


def _reads_once(right: Any) -> Any:
    def read_all(self: RunDriver) -> Steps[None]:
        if self._coordinator.ledger.sightings:
            self._full_read_s = float("inf")
        else:
            yield from right(self)

    return read_all


def _until_all_know(right: Any) -> Any:
    def winding_up(self: Election) -> bool:
        return self._driver is not None and self._driver.winding_up and not self._driver.over

    return property(winding_up)


def _begins_without_asking(right: Any) -> Any:
    def begin_run(self: Election) -> Steps[float]:
        steps = right(self)
        next(steps)
        effect = steps.send(None)
        while True:
            try:
                effect = steps.send((yield effect))
            except StopIteration as end:
                return float(end.value)

    return begin_run


def _settles_nothing(right: Any) -> Any:
    return property(lambda self: self.plan.history() if self.plan is not None else None)


def _leads_once(right: Any) -> Any:
    def lead(self: Election) -> Steps[None]:
        self._over = True
        yield from right(self)

    return lead


# -- the budget ---------------------------------------------------------------------------------


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


_OF_THE_BUDGET = (
    Mutant(
        "forgives-early",
        "failures are forgiven after half of the window",
        ((budget, "_forgiven", _forgives_in_half_the_time),),
        focus=("worker fails",),
        first=26,
    ),
    Mutant(
        "forgives-twice",
        "the same progress forgives one failure after the other",
        ((budget, "_forgiven", _keeps_the_credit),),
        focus=("worker fails",),
        first=24,
    ),
    Mutant(
        "saves-credit",
        "progress made before a failure forgives it",
        ((budget, "_most_s", _always(1e9)),),
        focus=("worker fails",),
    ),
    Mutant(
        "counts-anything",
        "a generation that failed at once made progress",
        ((budget, "_made_progress", _always(True)),),
        focus=("worker fails",),
    ),
    Mutant(
        "counts-nothing",
        "the progress of a generation is not counted",
        (
            (budget, "_progress_s", lambda right: lambda now, plan: plan.budget.progress_s),
            (budget, "write_at_s", _always(float("inf"))),
        ),
        focus=("worker fails",),
        hosting="serve",
        first=24,
    ),
    Mutant(
        "loses-forgiveness",
        "a new store has the charged failures, but not the forgiven ones",
        ((Plan, "history", _remembers_no_budget),),
        focus=("worker fails", "store crash"),
        hosting="serve",
        first=66,
    ),
    Mutant(
        "never-gives-up",
        "a failure that repeats is tried again and again",
        ((budget, "repeats", _always(False)),),
        focus=("broken script",),
        hosting="serve",
    ),
    Mutant(
        "gives-up-at-once",
        "a failure before any progress ends the run without a retry",
        ((budget, "repeats", lambda right: lambda plan: plan.failure and plan.failure.signature),),
        focus=("broken script", "worker fails"),
    ),
    Mutant(
        "unknown-counts-as-same",
        "two failures without a signature count as the same one",
        ((budget, "repeats", lambda right: lambda plan: plan.failure.signature == plan.budget.signature),),
        focus=("worker fails",),
    ),
    Mutant(
        "repeats-across-worlds",
        "a failure repeats one before which another world ran",
        ((budget, "not_charged", lambda right: lambda plan: plan),),
        focus=("broken script", "agent crash"),
    ),
    Mutant(
        "never-pauses",
        "the restarts of a crash loop follow each other at once",
        ((budget, "pause_s", _always(0.0)),),
        focus=("worker fails",),
    ),
)


# -- notices ------------------------------------------------------------------------------------


def _seats_leavers(right: Any) -> Any:
    def ready(self: cluster_view.ClusterView) -> list[leases.Sighting]:
        forgetful = replace(self, plan=msgspec.structs.replace(self.plan, leaving=()))
        return right(forgetful)  # type: ignore[no-any-return]

    return ready


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


def _forgets_what_it_heard(right: Any) -> Any:
    def forming_plan(plan: Plan, reason: str, **changes: object) -> Plan:
        return msgspec.structs.replace(right(plan, reason, **changes), acknowledged={})

    return forming_plan


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


def _leaving_is_left(right: Any) -> Any:
    def departed(now: cluster_view.ClusterView) -> tuple[str, ...]:
        known = {key: now.ledger.sightings.get(key) for key in now.plan.leaving}
        early = (key for key, one in known.items() if one is not None and one.member.state is State.READY)
        return tuple(dict.fromkeys((*right(now), *early)))

    return departed


def _none_still_stop(right: Any) -> Any:
    return staticmethod(lambda now: {})


def _any_requeuer(right: Any) -> Any:
    def stopped(now: cluster_view.ClusterView, plan: Plan, notice: records.Notice) -> Plan:
        return msgspec.structs.replace(right(now, plan, notice), requeuer=min(now.ledger.sightings))

    return stopped


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


def _takes_any_for_newcomers(right: Any) -> Any:
    def newcomers(now: cluster_view.ClusterView) -> list[leases.Sighting]:
        if now.plan.phase is not records.Phase.STOPPED:
            return []
        next_generation = now.plan.generation + 1
        return [
            one
            for one in now.by_node.values()
            if one.member.state is State.READY and one.member.generation in (0, next_generation)
        ]

    return staticmethod(newcomers)


def _any_size(right: Any) -> Any:
    def fit(self: records.Policy, nodes: int) -> int:
        size = min(nodes, self.max_nodes)
        return size if size >= self.min_nodes else 0

    return fit


_OF_NOTICES = (
    Mutant(
        "left-before-exit",
        "a leaving node counts as gone while its workers still save",
        ((coordinator, "departed", _leaving_is_left),),
        focus=("drain other", "join", "start hangs"),
    ),
    Mutant(
        "stopped-while-saving",
        "that all workers have exited after a stop is published while some still save",
        ((coordinator.Coordinator, "_still_stopping", _none_still_stop),),
        focus=("stop",),
    ),
    Mutant(
        "seats-a-leaver",
        "a leaving node gets a seat",
        ((cluster_view.ClusterView, "ready", _seats_leavers),),
        focus=("drain other", "worker fails", "join", "start hangs"),
    ),
    Mutant(
        "drops-the-stop",
        "the next generation of a run that is to end gets no notice",
        ((running, "carried", _always(None)),),
        focus=("stop", "worker fails", "agent crash"),
    ),
    Mutant(
        "only-requester-repeats-stop",
        "in a new store only the requesting node repeats the stop request",
        ((node.Node, "store_replaced", _leaves_the_end_to_the_asker),),
        focus=("stop", "host crash", "store crash"),
        hosting="agent",
        first=122,
    ),
    Mutant(
        "does-not-wait-for-all",
        "the next world forms when the first workers have left",
        ((running, "decide_under_notice", _impatient),),
        focus=("drain", "drain other", "join"),
    ),
    Mutant(
        "charges-a-notice",
        "workers that left after a notice are charged as a failure",
        ((notices, "after_notice", _a_notice_is_a_failure),),
        focus=("drain", "drain other", "join"),
    ),
    Mutant(
        "processes-requests-twice",
        "with a new generation the coordinator forgets which requests it has acknowledged",
        (
            (notices, "forming_plan", _forgets_what_it_heard),
            (running, "forming_plan", _forgets_what_it_heard),
        ),
        focus=("drain other", "join", "worker fails"),
    ),
    Mutant(
        "obeys-void-requests",
        "a request from before the run was stopped and resumed is carried out afterwards",
        ((notices, "_is_of_this_life", _always(True)),),
        focus=("stop", "partition", "agent freeze", "join"),
        first=89,
    ),
    Mutant(
        "half-the-time",
        "workers are stopped when half of the notice's time is over",
        ((cluster_view.PhaseClock, "of", _half_the_time),),
        focus=("drain", "drain other", "stop"),
    ),
    Mutant(
        "delivers-no-notice",
        "a node does not deliver notices to its workers",
        ((node.Node, "_notify", _always([])),),
        focus=("join",),
        first=95,
    ),
    Mutant(
        "any-requeuer",
        "a node that is gone may be selected to requeue a stopped run",
        ((notices, "stopped", _any_requeuer), (forming, "stopped", _any_requeuer)),
        focus=("stop", "agent crash"),
    ),
    Mutant(
        "does-not-stop",
        "a stop request is acknowledged, and nothing follows",
        ((notices, "_follow", _does_not_stop),),
        first=162,
    ),
    Mutant(
        "any-leaver-stops",
        "a run is stopped when a node leaves, although others could continue it",
        ((notices, "_leaves_none", _always(True)),),
        focus=("drain", "drain other", "worker fails"),
    ),
    Mutant(
        "leaves-without-asking",
        "a node outside the world that is asked to leave does so before the coordinator knows",
        ((node.Node, "_concerns_others", _only_with_workers),),
        focus=("asked twice",),
    ),
    Mutant(
        "first-registered-leaver-stops",
        "a run is stopped when the first node that registers in a new store leaves, before the others have registered",
        ((notices, "_may_register", _always(False)),),
        focus=("drain", "drain other", "store crash"),
    ),
    Mutant(
        "second-agent-leaves-for-the-first",
        "a request to leave by an agent with the node id of another removes the other's node",
        ((notices, "_is_of_a_second_agent", _always(False)),),
        first=1417,
    ),
    Mutant(
        "does-not-leave",
        "a node without an answer to its request does not leave",
        ((node.Node, "leave_now", _always([])),),
        focus=("drain", "partition", "worker fails"),
    ),
    Mutant(
        "resumes-too-early",
        "a stopped run is resumed at once, while workers of it are still being stopped",
        (
            (coordinator.Coordinator, "_still_stopping", _always({})),
            (coordinator, "ACK_PATIENCE_LEASES", lambda right: 0.0),
        ),
        focus=("stop",),
    ),
    Mutant(
        "resumed-by-stopped-node",
        "a node that has not read the stop yet resumes the run",
        ((coordinator.Coordinator, "_newcomers_after_stop", _takes_any_for_newcomers),),
        focus=("stop", "partition", "deaf", "agent freeze"),
    ),
    Mutant(
        "resumed-by-requester",
        "a node that requested the stop before it read a plan resumes the run",
        ((node.Node, "_requests_end", lambda right: property(lambda self: False)),),
        focus=("stop", "join"),
    ),
    Mutant(
        "any-size",
        "worlds of sizes that are not allowed are sealed",
        ((records.Policy, "fit", _any_size),),
        focus=("agent crash", "join"),
    ),
)

# -- the node's session -------------------------------------------------------------------------


def _counts_from_the_answer(right: Any) -> Any:
    def hold(self: NodeSession, held: leases.HeldLease, sent_s: float) -> float:
        late = leases.HeldLease.granted(held.record, self._clock())
        return right(self, late, sent_s)  # type: ignore[no-any-return]

    return hold


def _goes_on_counting_versions(right: Any) -> Any:
    def connected(self: NodeSession, commands: Connection) -> None:
        version = self._read_version
        right(self, commands)
        self._read_version = version

    return connected


def _does_not_retell(right: Any) -> Any:
    def rejoin(self: NodeSession, incarnation: str) -> None:
        right(self, incarnation)
        self._retell = False

    return rejoin


def _closes_all(right: Any) -> Any:
    def keep_only(self: BootstrapOffers, world: records.World) -> None:
        self.close()

    return keep_only


_OF_THE_SESSION = (
    Mutant(
        "keeps-plan-version",
        "in a new store a node waits for a plan with a higher version than the last store's",
        ((NodeSession, "_connected", _goes_on_counting_versions),),
        first=58,
    ),
    Mutant(
        "plan-not-redelivered",
        "the plan that the node has read before is not delivered to a new incarnation",
        ((NodeSession, "rejoin", _does_not_retell),),
        first=77,
    ),
    Mutant(
        "reports-no-history",
        "a node does not report its history to a store with less history",
        ((NodeSession, "_knows_more_than", _always(False)),),
        first=290,
    ),
    Mutant(
        "renews-over-the-fence",
        "a renewal that is answered late counts although the guard has killed the workers",
        ((NodeSession, "fenced", _always(None)),),
        focus=("freeze at renewal",),
    ),
    Mutant(
        "closes-the-needed-store",
        "a node stops serving the bootstrap store of the world that is about to start",
        ((BootstrapOffers, "keep_only", _closes_all),),
    ),
)

# -- authenticated records ----------------------------------------------------------------------


def _without_path(right: Any) -> Any:
    return lambda key, path, number, record: right(key, "", number, record)


def _without_number(right: Any) -> Any:
    return lambda key, path, number, record: right(key, path, b"", record)


def _any_greeting(right: Any) -> Any:
    def tag(key: bytes, path: str, number: bytes, record: bytes) -> bytes:
        return right(key, "a greeting" if "/welcome/" in path else path, number, record)  # type: ignore[no-any-return]

    return tag


def _without_epoch(right: Any) -> Any:
    return lambda root, epoch: right(root, b"")


def _takes_the_record_as_it_is(right: Any) -> Any:
    return classmethod(
        lambda cls, raw, why: raw[keyed.HEAD_BYTES :] if raw.startswith(sealing.MAGIC) else raw
    )


def _remembers_no_number(right: Any) -> Any:
    def opened(self: sealed_records.SealedRecords, key: str, data: bytes) -> bytes:
        self._seals.newest.pop(key, None)
        return right(self, key, data)  # type: ignore[no-any-return]

    return opened


def _without(kind: str) -> Callable[[Any], Any]:
    return lambda right: replace(right, of_run=re.compile(right.of_run.pattern.replace(f"{kind}|", "", 1)))


def _without_revision(right: Any) -> Any:
    """What seals the epoch: the revision in which the life was written, and the life."""
    return lambda root, epoch: right(root, epoch.partition(b"/")[2] if b"/" in epoch else epoch)


def _without_in_etcd(kind: str) -> Callable[[Any], Any]:
    def changed(right: Any) -> Any:
        def init(self: RunSecret, secret: sealing.Secret, run_root: str) -> None:
            right(self, secret, run_root)
            self._kinds = _without(kind)(self._kinds)

        return init

    return changed


def _gives_up_a_removed_record(right: Any) -> Any:
    def replace_record(self: link.EtcdLink, name: str, data: bytes, known: int) -> None:
        if self._client.get(self._keys.member(name)) is not None:
            right(self, name, data, known)

    return replace_record


def _ignores_the_life(right: Any) -> Any:
    def init(self: leadership.Leadership, *args: Any) -> None:
        right(self, *args)
        self._life_is_ours = self._is_leader

    return init


def _names_the_store_by_its_life(right: Any) -> Any:
    def init(self: link.EtcdLink, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs)
        self.store_id = self.store_id.rpartition(".")[0]

    return init


def _in_etcd(name: str, what: str, *patches: Patch, forgers: str = "", **more: Any) -> Mutant:
    """One that another client of etcd shows."""
    quirks = (f"forgers {forgers}",) if forgers else ()
    return Mutant(f"etcd-{name}", what, patches, quirks=quirks, hosting="etcd", forged=True, **more)


_OF_SEALS_IN_ETCD = (
    _in_etcd(
        "seal-without-path",
        "what authenticates a record in etcd does not cover its key",
        (sealing, "_tag", _without_path),
        forgers="move",
    ),
    _in_etcd(
        "seal-without-number",
        "what authenticates a record in etcd does not cover its number",
        (sealing, "_tag", _without_number),
        forgers="renumber",
    ),
    _in_etcd(
        "seal-without-epoch",
        "records of an earlier life of the run in etcd count",
        (sealing, "_epoch_key", _without_epoch),
        forgers="end life,replay",
    ),
    _in_etcd(
        "epoch-without-revision",
        "a life of the run in etcd that is written back is the earlier one",
        (sealing, "_epoch_key", _without_revision),
        forgers="end life,replay",
    ),
    _in_etcd(
        "accepts-unverified-records",
        "a record in etcd counts whether or not it is authenticated",
        (sealing.Unverified, "of", _takes_the_record_as_it_is),
    ),
    _in_etcd(
        "accepts-earlier-records",
        "a record in etcd counts although a newer one was there before",
        (sealed_records.SealedRecords, "opened", _remembers_no_number),
        forgers="replay",
    ),
    _in_etcd(
        "plans-not-authenticated",
        "plans in etcd are not authenticated",
        (RunSecret, "__init__", _without_in_etcd("plan")),
    ),
    _in_etcd(
        "members-not-authenticated",
        "member records in etcd are not authenticated",
        (RunSecret, "__init__", _without_in_etcd("m")),
    ),
    _in_etcd(
        "leases-not-authenticated",
        "leases in etcd are not authenticated",
        (RunSecret, "__init__", _without_in_etcd("l")),
    ),
    _in_etcd(
        "earlier-plans-are-unknown",
        "a coordinator in etcd goes on from the plan that it finds, and not from the newest that was there",
        (leadership.Leadership, "_read_earlier_plans", _always(None)),
        forgers="withhold,depose",
    ),
    _in_etcd(
        "withheld-plans-stay-away",
        "the coordinator does not write the newest plan in etcd again when another client has removed it",
        (leadership.Leadership, "_keep", _always(None)),
        forgers="withhold",
        first=10,
    ),
    _in_etcd(
        "removed-members-stay-away",
        "a node does not write its record in etcd again when another client has removed it",
        (link.EtcdLink, "_keep", _always(None)),
        (link.EtcdLink, "_replace", _gives_up_a_removed_record),
        forgers="delete",
        first=115,
    ),
    _in_etcd(
        "leads-an-ended-life",
        "a coordinator goes on when another client has ended the life of the run in etcd",
        (leadership.Leadership, "__init__", _ignores_the_life),
        forgers="end life",
        first=5,
    ),
    _in_etcd(
        "names-the-store-by-its-life",
        "nodes take a life of the run in etcd that is written back for the earlier one",
        (link.EtcdLink, "__init__", _names_the_store_by_its_life),
        first=1075,
    ),
)

_OF_SEALS = (
    *_OF_SEALS_IN_ETCD,
    Mutant(
        "seal-without-path",
        "what authenticates a record does not cover the key that it is stored under",
        ((sealing, "_tag", _without_path),),
        quirks=("forgers move",),
        forged=True,
    ),
    Mutant(
        "seal-without-number",
        "what authenticates a record does not cover its number",
        ((sealing, "_tag", _without_number),),
        quirks=("forgers renumber",),
        forged=True,
    ),
    Mutant(
        "seal-without-epoch",
        "records of an earlier life of the store count",
        ((sealing, "_epoch_key", _without_epoch),),
        focus=("store crash", "join"),
        quirks=("forgers replay",),
        forged=True,
    ),
    Mutant(
        "answers-to-any-greeting",
        "the answer to another greeting, in an earlier life of the store, is taken for the answer",
        ((sealing, "_tag", _any_greeting),),
        quirks=("forgers greet",),
        focus=("store crash", "join"),
        forged=True,
        first=12,
    ),
    Mutant(
        "accepts-unverified-records",
        "a record counts whether or not it is authenticated",
        ((sealing.Unverified, "of", _takes_the_record_as_it_is),),
        forged=True,
    ),
    Mutant(
        "accepts-earlier-records",
        "a record counts although a newer one was there before",
        ((sealed_records.SealedRecords, "opened", _remembers_no_number),),
        quirks=("forgers replay",),
        forged=True,
    ),
    Mutant(
        "revives-revoked-leases",
        "a lease that was revoked counts as it was before the revocation",
        ((sealed_records, "REVOKED", lambda right: 0),),
        quirks=("forgers replay",),
        forged=True,
    ),
    Mutant(
        "plans-not-authenticated",
        "plans are not authenticated",
        ((sealed, "KINDS", _without("plan")),),
        forged=True,
    ),
    Mutant(
        "members-not-authenticated",
        "member records are not authenticated",
        ((sealed, "KINDS", _without("m")),),
        forged=True,
    ),
    Mutant(
        "leases-not-authenticated",
        "leases are not authenticated",
        ((sealed, "KINDS", _without("l")),),
        forged=True,
    ),
    Mutant(
        "removed-leases-were-not-renewed",
        "a lease that another client has removed counts from the last renewal that the coordinator saw",
        (
            (
                leases.LeaseLedger,
                "revoked",
                lambda right: lambda self, incarnation, gone_s=None: right(self, incarnation),
            ),
        ),
        quirks=("forgers delete",),
        hosting="serve",
        first=440,
        forged=True,
    ),
    Mutant(
        "withheld-plans-stay-away",
        "the coordinator does not write the newest plan again when another client has removed it",
        ((plans.PlanWriter, "keep", _always(None)),),
        quirks=("forgers withhold",),
        forged=True,
    ),
)

_ALL = (
    Mutant(
        "seals-uncleared",
        "the coordinator seals a generation without waiting for the previous one to be cleared",
        ((forming, "clearance_deadlines", _always({})),),
    ),
    Mutant(
        "offers-once",
        "a node that could not offer a bootstrap store does not try again",
        ((NodeSession, "_may_offer_again", _always(False)),),
        focus=("no port", "worker fails"),
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
        first=56,
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
    Mutant(
        "never-charges",
        "no failure is ever charged",
        ((forming, "_charge", _always(False)),),
    ),
    Mutant(
        "two-seats",
        "every incarnation of a node may get a seat",
        ((cluster_view.ClusterView, "ready", _everybody_ready), (forming, "_choose", _chooses_all)),
    ),
    Mutant(
        "gapped-ranks",
        "ranks are not contiguous",
        ((forming, "seat_members", _gapped_ranks),),
    ),
    Mutant(
        "generation-reused",
        "a new store begins at generation 1 again, whatever is remembered",
        ((coordinator.Coordinator, "_newest_history", _always(None)),),
    ),
    Mutant(
        "history-tie",
        "of two histories the one that only knew the generation forming may win",
        ((coordinator.Coordinator, "_newest_history", _highest_generation_first_told),),
        focus=("crash at publishing", "join", "partition"),
    ),
    Mutant(
        "forgets-the-lease",
        "a new store goes by the lease of the node that is back first",
        ((records.Policy, "covering", lambda right: lambda self, history: self),),
        focus=("store crash", "partition", "join", "agent crash", "etcd data loss"),
    ),
    Mutant(
        "ready-before-stopped",
        "a node publishes ready while its workers are still being stopped",
        ((node.Node, "_forming", _ready_at_once),),
    ),
    Mutant(
        "ignores-lost-lease",
        "a node goes on with an incarnation whose lease is lost",
        ((node.Node, "lease_lost", _always([])),),
    ),
    Mutant(
        "finishes-early",
        "the run is finished when the first node succeeded",
        ((running, "_succeeded", _any_success_finishes),),
    ),
    Mutant(
        "renews-revoked",
        "a revoked lease can be renewed",
        quirks=("renews revoked",),
        focus=("start hangs",),
    ),
    Mutant(
        "deadline-from-reply",
        "the node's deadline counts from the answer to a renewal",
        ((NodeSession, "_hold", _counts_from_the_answer),),
        focus=("late answer",),
        first=238,
    ),
    Mutant(
        "deadline-from-last-attempt",
        "the node's deadline counts from the last attempt of a renewal that was repeated",
        ((leases.FirstSent, "of", lambda right: lambda self, what, now_s: now_s),),
        focus=("lost answer",),
    ),
    Mutant(
        "time-before-the-read",
        "the coordinator dates what it reads by the time before its request",
        (
            (RunDriver, "_read", _dates_before_the_request),
            (RunDriver, "_read_leases", _dates_before_the_request),
        ),
        focus=("freeze at reading", "partition"),
        first=90,
    ),
    Mutant(
        "blind-publish",
        "the coordinator publishes without compare-and-set",
        quirks=("blind publish",),
        first=99,
    ),
    Mutant(
        "saves-after-publishing",
        "the coordinator writes a generation to its disk only after publishing it",
        ((RunDriver, "_publish", _saves_after_publishing),),
        focus=("crash at publishing",),
    ),
    Mutant(
        "last-call-is-written",
        "of the histories that wait for the disk the one that was handed in last is written, not the newest",
        ((RunHistoryStore, "save_soon", _last_call_is_written),),
        focus=("slow disk", "worker fails", "join"),
        hosting="etcd",
        first=340,
    ),
    Mutant(
        "needs-its-disk",
        "the coordinator ends when its disk cannot be written",
        ((RunDriver, "_save", _saves_or_fails),),
        focus=("full disk",),
    ),
    Mutant(
        "claims-without-proof",
        "a restarted agent claims that its old workers are gone without looking",
        quirks=("no proof",),
        first=52,
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
        focus=("coordinator freeze", "office lost", "agent crash", "stragglers"),
        hosting="etcd",
    ),
    Mutant(
        "takeover-clears-at-once",
        "a new coordinator counts unregistered nodes as cleared",
        ((leases.LeaseLedger, "fenced_s", _clears_at_once),),
        focus=("start hangs", "deaf", "partition", "office lost", "slow network"),
        hosting="etcd",
    ),
    Mutant(
        "takeover-revokes",
        "a new coordinator counts the time before its term as time without renewals",
        ((leases.LeaseLedger, "observe", _takes_the_silent_for_lost),),
        focus=("office lost",),
        hosting="etcd",
    ),
    Mutant(
        "dates-before-the-write",
        "a new coordinator dates a lease by the last answer that came before it was written",
        ((revisions.RevisionTimes, "written_by", _dates_before_the_write),),
        focus=("office lost", "coordinator freeze", "partition"),
        hosting="etcd",
    ),
    Mutant(
        "dates-by-another-etcd",
        "a new coordinator dates a lease by revisions of an etcd whose data are lost",
        (
            (revisions.RevisionTimes, "saw", _takes_any_etcd_for_the_same),
            (revisions.RevisionTimes, "written_by", _takes_any_etcd_for_the_same),
        ),
        focus=("etcd data loss", "office lost"),
        hosting="etcd",
    ),
    Mutant(
        "ignores-unregistered-nodes",
        "in an etcd that lost its data a world forms before the nodes of the last one have registered or are fenced",
        ((coordinator.Coordinator, "_alone", _forms_at_once),),
        focus=("stranger first",),
        hosting="etcd",
    ),
    Mutant(
        "clears-no-unknown-world",
        "a world that a node runs and reports is not cleared if the coordinator's disk has the history of another run",
        ((coordinator.Coordinator, "_unknown_worlds", _always(None)),),
        focus=("stranger first",),
        hosting="etcd",
        first=185,
    ),
    Mutant(
        "youngest-first",
        "of two agents with one node id the younger one counts",
        ((cluster_view, "_precedes", _the_youngest_first),),
        focus=("impostor",),
    ),
    Mutant(
        "seat-is-no-claim",
        "a new coordinator, which sees both for the first time, rejects the agent with the seat for a second one",
        ((cluster_view, "_precedes", _ignores_seats),),
        focus=("impostor", "agent freeze"),
        hosting="cluster",
        first=63,
    ),
    Mutant(
        "goes-above-unpublished",
        "a generation that a former leader could not publish ends the running world, uncharged",
        ((coordinator.Coordinator, "_higher_history", _above_intentions),),
        focus=("office lost", "worker fails", "drain", "lossy network"),
        hosting="etcd",
        first=1600,
    ),
    Mutant(
        "stays-below",
        "a later generation of which a node tells is not gone above",
        ((coordinator.Coordinator, "_higher_history", _always(None)),),
        focus=("stranger first",),
        hosting="etcd",
        first=57,
    ),
    Mutant(
        "clears-only-what-it-is-told",
        "above a generation of which a node tells, a world forms while the one before it still runs",
        ((coordinator.Coordinator, "_above", _clears_the_reported_world_alone),),
        focus=("stranger first", "unkillable"),
        hosting="etcd",
        first=166,
    ),
    Mutant(
        "charges-beside-the-unknown",
        "a failure is charged although nothing is known of a participant any more",
        ((forming, "_departed", _unknown_is_present),),
        focus=("host away", "worker fails", "office lost"),
        hosting="etcd",
    ),
    Mutant(
        "accepts-duplicate-ids",
        "a second agent with the id of a live node is not refused",
        ((coordinator.Coordinator, "_refusals", _always(None)),),
        focus=("impostor",),
    ),
    Mutant(
        "waits-for-a-hung-stop",
        "a node that renews its lease and does not stop its workers is waited for without end",
        ((forming, "STOP_SLACK_S", lambda right: float("inf")),),
        focus=("stop hangs", "worker fails"),
    ),
    Mutant(
        "waits-for-a-hung-start",
        "a node whose workers never start is waited for without end",
        ((running, "_is_slow", _always(False)),),
        focus=("start hangs",),
        first=8,
    ),
    Mutant(
        "leaves-before-the-end",
        "the coordinator leaves when every node knows the outcome, before the records are removed",
        ((Election, "winding_up", _until_all_know),),
        hosting="etcd",
        first=110,
    ),
    Mutant(
        "forgets-how-it-ended",
        "a run begins without a look at how the last one of its name ended in this etcd",
        ((Election, "_begin_run", _begins_without_asking),),
        focus=("join",),
        hosting="etcd",
    ),
    Mutant(
        "settles-nothing",
        "that every node knew the outcome is not written down",
        ((RunDriver, "_settled_history", _settles_nothing),),
        focus=("join",),
    ),
    Mutant(
        "leads-once",
        "an agent that lost its leadership takes no part in elections any more",
        ((Election, "_lead", _leads_once),),
        focus=("office lost", "coordinator freeze"),
        hosting="etcd",
    ),
    Mutant(
        "ignores-gaps",
        "a new coordinator's news are all it takes in: nothing is read again",
        ((RunDriver, "_read_all", _reads_once),),
        focus=("hint loss", "host crash"),
        hosting="etcd",
    ),
)

MUTANTS: dict[str, Mutant] = {
    mutant.name: mutant for mutant in (*_ALL, *_OF_THE_SESSION, *_OF_NOTICES, *_OF_THE_BUDGET, *_OF_SEALS)
}
