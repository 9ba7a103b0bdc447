"""The coordinator's input: the plan, the members, and when each was seen. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from .leases import LeaseLedger, Sighting
from .records import Member, Notice, Phase, Plan, Policy, Seat, State

FAR_S = float("inf")

PROGRESS_S = 60.0
"""A world that ran this long has made progress."""
LONGEST_READMISSION_S = 300.0


@dataclass(frozen=True)
class Decision:
    """What to do next, and why.

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
    """It is to wait because fewer nodes than required, or desired, have joined."""
    joined: tuple[str, ...] = ()
    """The ids of those that have, then."""


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
    world_runs_since_s: float | None = None
    """Since when the workers of all nodes were seen to run."""
    progress_before_s: float = 0.0
    """What the plan's budget knew of the run's progress then."""

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

        def later(at_s: float | None) -> float | None:
            return None if at_s is None else min(at_s + lasted_s, now_s)

        self.since_s = min(self.since_s + lasted_s, now_s)
        self.enough_since_s = later(self.enough_since_s)
        self.interrupted_since_s = later(self.interrupted_since_s)
        self.cleared_s = later(self.cleared_s)
        self.world_runs_since_s = later(self.world_runs_since_s)


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
    """How often in a row each node was lost without progress, participants being cleared included."""

    @classmethod
    def of(cls, plan: Plan, ledger: LeaseLedger, clock: PhaseClock, now_s: float) -> ClusterView:
        """Determine the current incarnation of each node."""
        speaking = current_incarnations(plan, ledger.sightings.values())
        return cls(plan, ledger, clock, now_s, speaking, count_losses(plan, ledger))

    @property
    def policy(self) -> Policy:
        """The run's rules."""
        return self.plan.policy

    @property
    def notice_left_s(self) -> float:
        """How long workers still have that were given a notice."""
        return max(0.0, self.clock.notice_ends_s - self.now_s)

    def sighting(self, seat: Seat) -> Sighting | None:
        """Return the records of the incarnation that holds this seat."""
        return self.ledger.sightings.get(seat.incarnation)

    def ready(self) -> list[Sighting]:
        """Return nodes whose newest record states that they are ready for the generation being formed."""
        generation, leaving = self.plan.generation, self.plan.leaving
        return [
            node
            for node in self.by_node.values()
            if node.member.state is State.READY
            and node.member.generation == generation
            and node.member.incarnation not in leaving
        ]

    def penalty_until_s(self, sighting: Sighting) -> float:
        """Return until when a node that was lost repeatedly is kept waiting."""
        delay_s = readmission_delay_s(self.losses.get(sighting.member.node_id, 0), self.policy)
        return sighting.first_seen_s + delay_s if delay_s else 0.0

    def strikes(self, sighting: Sighting) -> int:
        """Return how often in a row this node was lost without progress, or failed before user code ran."""
        node_id = sighting.member.node_id
        return max(self.losses.get(node_id, 0), self.plan.start_failures.get(node_id, 0))

    def held_back(self, sighting: Sighting) -> bool:
        """Return whether this node should be left out as long as enough others remain."""
        failed_starts = self.plan.start_failures.get(sighting.member.node_id, 0)
        return failed_starts >= 2 or self.now_s < self.penalty_until_s(sighting)


def readmission_delay_s(losses: int, policy: Policy) -> float:
    """Return how long after its registration a node is kept waiting that was lost so often in a row; 0: not at all."""
    if losses < 2:  # a single loss is not a pattern
        return 0.0
    return min(2.0 ** min(losses, 30) * policy.settle_s, LONGEST_READMISSION_S)


def count_losses(plan: Plan, ledger: LeaseLedger) -> dict[str, int]:
    """Return the plan's count of losses, with the participants of the cleared generation that turned out lost.

    Often that is noticed only while the next one forms: the others' collectives fail long before a lease ends.
    """
    losses = dict(plan.losses)
    for seat in plan.uncleared:
        known = ledger.sightings.get(seat.incarnation)
        if known is not None and not known.alive and known.member.state not in (State.LEAVING, State.LEFT):
            losses[seat.node_id] = losses.get(seat.node_id, 0) + 1
    return losses


def current_incarnations(plan: Plan, sightings: Iterable[Sighting]) -> dict[str, Sighting]:
    """Return for each node its current incarnation."""
    chosen: dict[str, Sighting] = {}
    seated = {seat.incarnation for seat in unproven(plan)}
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
    if other.member.incarnation in node.member.replaces:
        return True
    if node.member.incarnation in other.member.replaces:
        return False
    ours, theirs = node.member.incarnation, other.member.incarnation
    if (ours in seated) != (theirs in seated):
        return ours in seated
    return (node.first_seen_s, ours) < (other.first_seen_s, theirs)


def stopped_before(member: Member, generation: int) -> bool:
    """Return whether the node's record states that its workers of every generation below this one are stopped."""
    if member.state is State.READY:
        return member.generation >= generation
    if member.state is State.STOPPED:
        return member.generation + 1 >= generation
    return member.state is State.LEFT


def departed(view: ClusterView) -> tuple[str, ...]:
    """Return incarnations that were to leave and whose workers have exited: they reported it, or they are fenced.

    An incarnation with a successor is not gone by that alone: the successor, if it is the same process, leaves when it
    reads that its predecessor was to.
    """
    ledger = view.ledger
    departed_members = [node.member for node in ledger.sightings.values() if node.member.state is State.LEFT]
    have_left = {member.incarnation for member in departed_members} | {
        old for member in departed_members for old in member.replaces
    }

    def is_gone(incarnation: str) -> bool:
        if incarnation in have_left:
            return True
        fenced_s = ledger.fenced_s(incarnation, view.policy)
        return fenced_s is not None and fenced_s <= view.now_s

    return tuple(incarnation for incarnation in view.plan.leaving if is_gone(incarnation))


def clearance_deadlines(view: ClusterView) -> dict[str, float]:
    """Return the seats of earlier generations whose workers may still run, with the time by which they cannot.

    The time is infinite for a node that is alive and has not reported that it stopped.
    """
    gone: set[str] = set()
    for node in view.ledger.sightings.values():
        gone.update(node.member.replaces)
    waits: dict[str, float] = {}
    for seat in view.plan.uncleared:
        known = view.sighting(seat)
        if seat.incarnation in gone or (
            known is not None and stopped_before(known.member, view.plan.generation)
        ):
            continue
        fenced_s = view.ledger.fenced_s(seat.incarnation, view.policy)
        if fenced_s is None:
            waits[seat.incarnation] = FAR_S
        elif fenced_s > view.now_s:
            waits[seat.incarnation] = fenced_s
    return waits


def carried(now: ClusterView) -> Notice | None:
    """Return the notice to repeat to the workers of the next generation: only that the run ends."""
    notice = now.plan.notice
    if notice is None or not notice.ends:
        return None
    return msgspec.structs.replace(notice, left_s=now.notice_left_s)


def unproven(plan: Plan) -> tuple[Seat, ...]:
    """Return every seat whose workers may run: those of the plan's world, and those awaited before."""
    seats = {seat.incarnation: seat for seat in plan.uncleared}
    seats.update({seat.incarnation: seat for seat in plan.world.seats} if plan.world is not None else {})
    return tuple(seats.values())


def stopped(now: ClusterView, plan: Plan, notice: Notice) -> Plan:
    """Return the plan that ends the run by request.

    Nodes that were told to leave speak for the run only if no other node is there: they may be gone already.
    """
    alive = {node.member.incarnation for node in now.by_node.values()}
    seats = plan.world.seats if plan.world else ()
    seated = [seat.incarnation for seat in seats if seat.incarnation in alive]
    speakers = sorted([*seated, *sorted(alive.difference(seated))], key=now.plan.leaving.__contains__)
    return msgspec.structs.replace(
        plan,
        version=now.plan.version + 1,
        phase=Phase.STOPPED,
        reason=notice.words[:512],
        notice=notice,
        uncleared=unproven(plan),
        failure=None,
        requeuer=next(iter(speakers), None),
    )


def count(number: int, noun: str) -> str:
    """Return ``1 node``, ``2 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def names(items: Iterable[str]) -> str:
    """Return a short enumeration for a sentence."""
    listed = sorted(items)
    if len(listed) > 8:
        return ", ".join(listed[:8]) + f" and {len(listed) - 8} more"
    return ", ".join(listed)
