"""The coordinator's input: the plan, the members, and when each was seen. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from elastic_agent.printable import listed

from .leases import FAR_S, LeaseLedger, Sighting
from .records import LONGEST_TEXT, Notice, Phase, Plan, Policy, Seat, State

PROGRESS_S = 60.0
"""A world that ran this long has made progress."""
UNSTABLE = 2
"""So often in a row a node is lost, or cannot start its workers, before it is left out: a single time is no pattern."""


@dataclass(frozen=True)
class Decision:
    """The next step, and why.

    ``plan`` follows the current plan's version by one, or is None when nothing changes. ``revoke``
    are incarnations whose leases are to be revoked, with the reason (each may fail: a renewal won the race).
    ``forget`` are incarnations whose records can be removed. ``wake_s`` is the time, by the
    coordinator's clock, at which to decide again if no record changes before.
    """

    reason: str
    plan: Plan | None = None
    revoke: Mapping[str, str] = field(default_factory=dict)
    forget: tuple[str, ...] = ()
    wake_s: float = FAR_S
    done: bool = False
    """The run is over and every live node has acknowledged it."""
    lacks_nodes: bool = False
    """It is to wait because fewer nodes have joined than required, or than the first world may have."""
    joined: tuple[str, ...] = ()
    """The ids of those that have, then."""

    @classmethod
    def to_publish(cls, plan: Plan) -> Decision:
        """Return the decision to publish this, for the reason that it contains."""
        return cls(plan.reason, plan)


@dataclass
class PhaseClock:
    """When the current phase began and when it first had enough nodes; the coordinator's clock, seconds."""

    since_s: float
    enough_since_s: float | None = None
    cleared_s: float | None = None
    """Terminal phases: since when no worker of the run is left."""
    notice: int = 0
    """Serial of the notice whose end is kept here."""
    notice_ends_s: float = FAR_S
    interrupted_since_s: float | None = None
    """When workers were first known to be interrupted without a notice."""
    warming_s: float | None = None
    """Forming: when those that warm up were last known to be enough with those that are ready; None: never."""
    world_runs_since_s: float | None = None
    """Since when the workers of all nodes were seen to run."""
    progress_before_s: float = 0.0
    """The run's progress as the plan's budget knew it then."""

    @classmethod
    def of(cls, plan: Plan, before: PhaseClock, now_s: float, *, new_phase: bool) -> PhaseClock:
        """Return the clock for a plan that is seen now, after the one that ``before`` was for."""
        clock = cls(now_s) if new_phase else before
        notice = plan.notice
        if notice is None:
            clock.notice, clock.notice_ends_s = 0, FAR_S
        elif notice.serial == before.notice:
            clock.notice, clock.notice_ends_s = before.notice, before.notice_ends_s
        else:
            clock.notice, clock.notice_ends_s = notice.serial, now_s + notice.left_s
        return clock

    def skip(self, lasted_s: float, now_s: float) -> None:
        """Exclude a pause that lasted until now. What began during it, between two freezes, begins now at the latest.

        The end of a notice is not moved: it is a deadline of the scheduler or the user.
        """
        times = (
            "since_s",
            "enough_since_s",
            "interrupted_since_s",
            "cleared_s",
            "world_runs_since_s",
            "warming_s",
        )
        for name in times:
            at_s = getattr(self, name)
            if at_s is not None:
                setattr(self, name, min(at_s + lasted_s, now_s))


@dataclass(frozen=True)
class ClusterView:
    """The state of the run at one moment."""

    plan: Plan
    ledger: LeaseLedger
    clock: PhaseClock
    now_s: float
    by_node: dict[str, Sighting] = field(default_factory=dict)
    """For each node its current incarnation: alive, not refused, the newest proven one."""
    losses: dict[str, int] = field(default_factory=dict)
    """The times in a row that each node was lost without progress, participants being cleared included."""

    @classmethod
    def of(cls, plan: Plan, ledger: LeaseLedger, clock: PhaseClock, now_s: float) -> ClusterView:
        """Determine the current incarnation of each node."""
        current = current_incarnations(plan, ledger.sightings.values())
        return cls(plan, ledger, clock, now_s, current, count_losses(plan, ledger, now_s))

    @property
    def policy(self) -> Policy:
        """The run's rules."""
        return self.plan.policy

    @property
    def notice_left_s(self) -> float:
        """Return the time that workers still have that were given a notice."""
        return max(0.0, self.clock.notice_ends_s - self.now_s)

    @property
    def carried_notice(self) -> Notice | None:
        """The notice to repeat to the workers of the next generation: only that the run ends."""
        notice = self.plan.notice
        if notice is None or not notice.ends:
            return None
        return msgspec.structs.replace(notice, left_s=self.notice_left_s)

    def ready(self) -> list[Sighting]:
        """Return nodes that are ready for the generation being formed; with or without a bootstrap store."""
        return [
            node
            for node in self.by_node.values()
            if self.is_ready(node) and node.member.incarnation not in self.plan.leaving
        ]

    def is_ready(self, node: Sighting) -> bool:
        """Return whether the node's newest record states that it is ready for the generation being formed."""
        member = node.member
        return (
            member.state is State.READY and member.generation == self.plan.generation and not member.warms_up
        )

    def is_unstable(self, node: Sighting) -> bool:
        """Return whether this node was lost, or did not come, again and again without progress in between."""
        return self.losses.get(node.member.node_id, 0) >= UNSTABLE

    def cannot_start(self, node: Sighting) -> bool:
        """Return whether this node failed before user code ran, again and again."""
        return self.plan.start_failures.get(node.member.node_id, 0) >= UNSTABLE

    def held_back(self, node: Sighting) -> bool:
        """Return whether this node should be left out as long as enough others remain."""
        return self.is_unstable(node) or self.cannot_start(node)

    def strikes(self, node: Sighting) -> int:
        """Return how often in a row this node was lost without progress, or failed before user code ran."""
        node_id = node.member.node_id
        return max(self.losses.get(node_id, 0), self.plan.start_failures.get(node_id, 0))


def count_losses(plan: Plan, ledger: LeaseLedger, now_s: float) -> dict[str, int]:
    """Return the plan's count of losses, with the participants of the cleared generation that turned out lost.

    Often that is noticed only while the next one forms: the others' collectives fail long before a lease ends. A node
    that was lost together with the store has not registered in the new one by then.
    """
    losses = dict(plan.losses)
    is_known_by_now = now_s >= ledger.born_s + plan.policy.lease_ttl_s
    gone = {*ledger.replaced(), *plan.leaving}
    for seat in plan.uncleared:
        known = ledger.sightings.get(seat.incarnation)
        has_vanished = known is None and is_known_by_now and seat.incarnation not in gone
        if has_vanished or (known is not None and not known.alive and not known.member.is_leaving):
            losses[seat.node_id] = losses.get(seat.node_id, 0) + 1
    return losses


def current_incarnations(plan: Plan, sightings: Iterable[Sighting]) -> dict[str, Sighting]:
    """Return for each node its current incarnation."""
    chosen: dict[str, Sighting] = {}
    seated = {seat.incarnation for seat in plan.seats_at_risk}
    for node in sightings:
        if not node.alive or node.member.incarnation in plan.refused or node.member.state is State.LEFT:
            continue
        if leased_too_long(node, plan.policy):
            continue  # about to be refused
        known = chosen.get(node.member.node_id)
        if known is None or _precedes(node, known, seated):
            chosen[node.member.node_id] = node
    return chosen


def leased_too_long(node: Sighting, policy: Policy) -> bool:
    """Return whether this incarnation's workers could outlive what the run waits for when a node is lost."""
    return node.lease.ttl_s > policy.lease_ttl_s + 1e-9


def _precedes(node: Sighting, other: Sighting, seated: set[str]) -> bool:
    """Return whether ``node``, not ``other``, is their node's current incarnation.

    A proven successor is, else the one with a seat, else the elder. A new coordinator sees all of them for the first
    time at once, so it cannot tell which is the elder.
    """
    ours, theirs = node.member.incarnation, other.member.incarnation
    if theirs in node.member.replaces:
        return True
    if ours in other.member.replaces:
        return False
    if (ours in seated) != (theirs in seated):
        return ours in seated
    return (node.first_seen_s, ours) < (other.first_seen_s, theirs)


def departed(view: ClusterView) -> tuple[str, ...]:
    """Return incarnations that were to leave and whose workers have exited: they reported it, or they are fenced.

    An incarnation with a successor is not gone by that alone: the successor, if it is the same process, leaves when it
    reads that its predecessor was to.
    """
    left = [node.member for node in view.ledger.sightings.values() if node.member.state is State.LEFT]
    have_left = {name for member in left for name in (member.incarnation, *member.replaces)}
    return tuple(
        incarnation
        for incarnation in view.plan.leaving
        if incarnation in have_left or view.ledger.fenced_s(incarnation, view.policy) <= view.now_s
    )


def clearance_deadlines(view: ClusterView) -> dict[str, float]:
    """Return the seats of earlier generations whose workers may still run, with the time by which they cannot.

    The time is infinite for a node that is alive and has not reported that it stopped. In a terminal phase, the
    plan's own generation is one of the earlier ones.
    """
    gone = view.ledger.replaced()
    generation = view.plan.generation + view.plan.is_terminal
    waits: dict[str, float] = {}
    for seat in view.plan.uncleared:
        known = view.ledger.sightings.get(seat.incarnation)
        if seat.incarnation in gone or (known is not None and known.member.clear >= generation):
            continue
        fenced_s = view.ledger.fenced_s(seat.incarnation, view.policy)
        if fenced_s > view.now_s:
            waits[seat.incarnation] = fenced_s
    return waits


def stopped(now: ClusterView, plan: Plan, notice: Notice) -> Plan:
    """Return ``plan``, which is to follow the present one, as the one that ends the run by request.

    Nodes that were told to leave speak for the run only if no other node is there: they may be gone already.
    """
    alive = {node.member.incarnation for node in now.by_node.values()}
    seated = [seat.incarnation for seat in plan.seats if seat.incarnation in alive]
    speakers = sorted([*seated, *sorted(alive.difference(seated))], key=now.plan.leaving.__contains__)
    return msgspec.structs.replace(
        plan,
        phase=Phase.STOPPED,
        reason=notice.words[:LONGEST_TEXT],
        notice=notice,
        uncleared=plan.seats_at_risk,
        failure=None,
        requeuer=next(iter(speakers), None),
    )


def count(number: int, noun: str) -> str:
    """Return ``1 node``, ``2 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def names(items: Iterable[str]) -> str:
    """Return a short enumeration for a sentence."""
    return listed(sorted(items), 8)


def node_names(nodes: Iterable[Seat | Sighting]) -> str:
    """Return the same of the ids of these nodes."""
    return names(node.node_id if isinstance(node, Seat) else node.member.node_id for node in nodes)
