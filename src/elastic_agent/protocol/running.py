"""The coordinator's rules while a generation runs: lost nodes, failures, nodes that join, its end. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import msgspec

from .cluster_view import PROGRESS_S, ClusterView, Decision, count, node_names
from .leases import FAR_S, Sighting
from .notices import announce_growth, decide_under_notice
from .records import Failure, FailureKind, Growth, Phase, Seat, State, World

EXPLAIN_S = 15.0
"""The time that an agent may take to publish what a signal that ended its workers means: it may query a scheduler."""


class SeatedNode:
    """One seat of the running world, as the coordinator knows it."""

    def __init__(self, now: ClusterView, seat: Seat) -> None:
        known = now.ledger.sightings.get(seat.incarnation)
        member = known.member if known is not None else None
        says = member if member is not None and member.generation == now.plan.generation else None
        self.seat = seat
        self.state = says.state if says is not None else None
        """Of this generation; None: nothing is known, or it is in another one."""
        self.failure = says.failure if says is not None else None
        self.is_lost = (
            not known.alive if known is not None else now.now_s >= now.ledger.born_s + now.policy.lease_ttl_s
        )
        """Its lease was revoked, or is over without a registration in this store."""
        self.is_leaving = member is not None and member.is_leaving
        self.dropped_out = member is not None and member.generation > now.plan.generation
        """Its record is of a later generation: it does not run this one any more."""
        self.is_late = (
            self.state is State.READY
            and not self.is_lost
            and now.now_s >= now.clock.since_s + now.policy.start_timeout_s
        )
        """It should have started its workers by now."""
        self.has_succeeded = self.state is State.SUCCEEDED or seat.incarnation in now.plan.succeeded
        self.has_saved = self.state is State.SAVED
        self.handles_notices = member is not None and member.handles_notices

    @property
    def is_interrupted(self) -> bool:
        """Return whether a signal that makes its agent stop has ended workers of it."""
        return self.failure is not None and self.failure.kind is FailureKind.INTERRUPTED

    @property
    def could_not_start(self) -> bool:
        """Return whether it failed before user code ran, or has not started in time."""
        before = (FailureKind.START, FailureKind.BOOTSTRAP)
        failed = self.state is State.FAILED and self.failure is not None and self.failure.kind in before
        return failed or self.is_late


def participants(now: ClusterView) -> list[SeatedNode]:
    """Return the seats of the plan's world, in order."""
    return [SeatedNode(now, seat) for seat in now.plan.seats]


def whole_world_runs(now: ClusterView) -> bool:
    """Return whether the workers of all nodes were started, and none is known to have failed."""
    started = (State.RUNNING, State.SAVED)
    return all(node.has_succeeded or node.state in started for node in participants(now))


def decide_running(now: ClusterView) -> Decision:
    """Form the next generation, finish the run, or leave the world alone."""
    world = now.plan.world
    assert world is not None  # a running plan always has one
    present = participants(now)
    decision = _decide(now, world, present)
    plan = decision.plan
    if plan is None or plan.phase is not Phase.FORMING:
        return decision
    # A world that was still starting has made no progress, however long that took.
    has_progressed = now.clock.world_runs_since_s is not None and now.now_s >= now.clock.since_s + PROGRESS_S
    losses = {} if has_progressed else dict(plan.losses)
    for node in present:  # those that are lost now are counted when the next is sealed
        if node.is_late:
            losses[node.seat.node_id] = losses.get(node.seat.node_id, 0) + 1
    known = msgspec.structs.replace(  # of the nodes, whatever has ended the generation
        plan,
        losses=losses,
        start_failures=_start_failures(now, present, forgiven=plan.losses if has_progressed else {}),
        avoid_bootstrap=_avoid_bootstrap(now, present),
    )
    return replace(decision, plan=known)


def _decide(now: ClusterView, world: World, present: list[SeatedNode]) -> Decision:
    waiting = [node for node in present if not node.has_succeeded]
    if not waiting:
        reason = f"generation {world.generation} succeeded on {count(len(world.seats), 'node')}"
        return Decision.to_publish(now.plan.following(reason, phase=Phase.FINISHED))
    busy = [node for node in waiting if not node.has_saved]
    ending = now.plan.notice is not None and now.plan.notice.ends
    # A node that has left for the run's end has done its part: it does not count as lost.
    lost = [node.seat for node in (busy if ending else waiting) if node.is_lost]
    failed = _first_failure(now, waiting)
    leaving = [node.seat for node in waiting if node.is_leaving]
    dropped = [node.seat for node in waiting if node.dropped_out]
    if lost or failed or leaving or dropped:
        signalled = any(node.is_interrupted for node in present)
        return _reform(now, lost, failed, leaving, dropped, signalled=signalled)
    gone = [node.seat for node in present if node.state is State.SUCCEEDED and node.is_lost]
    if new := [seat.incarnation for seat in gone if seat.incarnation not in now.plan.succeeded]:
        # Its record is removed soon, and with it what it says.
        reason = f"{node_names(gone)} succeeded and left"
        return Decision.to_publish(now.plan.following(reason, succeeded=(*now.plan.succeeded, *new)))
    handles_notices = any(node.handles_notices for node in present)
    if now.plan.notice is not None:
        joining = tuple(node.member.node_id for node in _waiting_to_join(now, world))
        return decide_under_notice(
            now, [node.seat for node in busy], joining, handles_notices=handles_notices
        )
    interrupted = [node.seat for node in waiting if node.is_interrupted]
    if interrupted:
        return _await_explanation(now, interrupted)
    if len(busy) < len(waiting):  # workers left although no notice is given (any more)
        saved = node_names(node.seat for node in waiting if node.has_saved)
        return Decision.to_publish(now.plan.forming(f"the workers of {saved} left", free=True))
    return _admit(now, world, present, handles_notices=handles_notices)


def _first_failure(now: ClusterView, waiting: list[SeatedNode]) -> tuple[Seat, Failure] | None:
    for node in waiting:
        if node.state is State.FAILED:
            unknown = f"{node.seat.node_id} failed without giving a reason"
            return node.seat, node.failure or Failure(FailureKind.WORKER, unknown)
    for node in waiting:
        if node.is_late:
            summary = (
                f"{node.seat.node_id} did not start its {count(node.seat.slots, 'worker')} within "
                f"{now.policy.start_timeout_s:g} s; start fewer there (--nproc-per-node), or allow more time "
                "(--start-timeout)"
            )
            return node.seat, Failure(FailureKind.START, summary)
    return None


def _await_explanation(now: ClusterView, interrupted: list[Seat]) -> Decision:
    """Wait until the agent publishes what the signal means: others may still save."""
    reason = f"a signal terminated workers of {node_names(interrupted)}"
    if now.clock.interrupted_since_s is None:
        now.clock.interrupted_since_s = now.now_s
    until_s = now.clock.interrupted_since_s + EXPLAIN_S
    if now.now_s < until_s:
        return Decision(f"{reason}; waiting for a drain or stop request", wake_s=until_s)
    return Decision.to_publish(now.plan.forming(reason, free=True))


def _reform(
    now: ClusterView,
    lost: list[Seat],
    failed: tuple[Seat, Failure] | None,
    leaving: list[Seat],
    dropped: list[Seat],
    *,
    signalled: bool,
) -> Decision:
    """Form the next generation. ``signalled``: what fails elsewhere may fail because a signal ended workers."""
    reasons = [failed[1].summary] if failed is not None else []
    for seats, state in ((lost, "lost"), (leaving, "leaving"), (dropped, "dropped out")):
        if seats:
            reasons.append(f"{node_names(seats)} {state}")
    return Decision.to_publish(
        now.plan.forming(
            "; ".join(reasons),
            failure=failed[1] if failed else None,
            failed_node=failed[0].node_id if failed else None,
            lost=tuple(seat.node_id for seat in lost),
            free=bool(lost or leaving or dropped) or signalled,
            notice=now.carried_notice,
        )
    )


def _start_failures(now: ClusterView, present: list[SeatedNode], forgiven: Collection[str]) -> dict[str, int]:
    """Count a node's failures before user code ran; the count restarts at 0 when the node runs, or is forgiven."""
    counts = {key: times for key, times in now.plan.start_failures.items() if key not in forgiven}
    for node in present:
        if node.could_not_start:
            counts[node.seat.node_id] = counts.get(node.seat.node_id, 0) + 1
        elif node.state in (State.RUNNING, State.SUCCEEDED, State.SAVED, State.FAILED):
            counts.pop(node.seat.node_id, None)
    return counts


def _avoid_bootstrap(now: ClusterView, present: list[SeatedNode]) -> tuple[str, ...]:
    """Return the nodes whose bootstrap store was unreachable since all of a world ran."""
    known = now.plan.avoid_bootstrap if now.clock.world_runs_since_s is None else ()
    found = [node.failure.unreachable_node for node in present if node.failure is not None]
    unreachable = tuple(dict.fromkeys((*known, *filter(None, found))))
    return unreachable if len(unreachable) < len(present) else ()


def _admit(now: ClusterView, world: World, present: list[SeatedNode], *, handles_notices: bool) -> Decision:
    """Let waiting nodes in, in batches: when the newest has waited for long enough."""
    starting = any(node.state is State.READY for node in present)
    wake_s = now.clock.since_s + now.policy.start_timeout_s if starting else FAR_S
    steady = Decision(
        f"{count(len(world.seats), 'node')}, {count(world.world_size, 'worker')} running", wake_s=wake_s
    )
    if starting or any(node.has_succeeded for node in present):
        return steady  # not yet running everywhere, or already ending
    grow = now.policy.grow
    grows = grow is Growth.AFTER or (grow is Growth.AT_NOTICE and handles_notices)
    # A node that only returns to a seat that it had may always join.
    candidates = [
        node for node in _waiting_to_join(now, world) if grows or node.member.node_id in now.plan.order
    ]
    if not candidates:
        return steady
    open_s = [_open_s(now, node) for node in candidates]
    allowed = [node for node, at_s in zip(candidates, open_s, strict=True) if at_s <= now.now_s]
    if not allowed or any(now.now_s < at_s <= now.now_s + now.policy.join_wait_s for at_s in open_s):
        later = min((at_s for at_s in open_s if at_s > now.now_s), default=FAR_S)
        return Decision(f"{node_names(candidates)} will join soon", wake_s=min(wake_s, later))
    if now.policy.fit(len(world.seats) + len(allowed)) <= len(world.seats):
        return steady  # one more would be left over
    if handles_notices:
        return announce_growth(now, allowed)
    reason = f"{node_names(allowed)} joined" if len(allowed) == 1 else f"{node_names(allowed)} join"
    joining = tuple(node.member.node_id for node in allowed)
    return Decision.to_publish(now.plan.forming(reason, joining=joining))


def _open_s(now: ClusterView, node: Sighting) -> float:
    """Return when a waiting node may be let in; one that was lost again and again, when the others made progress."""
    progress_s = now.clock.since_s + PROGRESS_S if now.is_unstable(node) else 0.0
    return max(node.first_seen_s + now.policy.join_wait_s, progress_s)


def _waiting_to_join(now: ClusterView, world: World) -> list[Sighting]:
    """Return nodes that wait outside the world, while it has room for them."""
    if len(world.seats) >= now.policy.max_nodes:
        return []
    seated = {seat.node_id for seat in world.seats}
    return [
        node
        for node in now.by_node.values()
        if node.member.node_id not in seated
        and node.member.state is State.READY
        and not node.member.warms_up
        and node.member.incarnation not in now.plan.leaving
        and (not now.cannot_start(node) or now.is_unstable(node))  # it was late, and may be in time now
    ]
