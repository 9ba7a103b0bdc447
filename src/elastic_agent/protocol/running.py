"""The coordinator's rules while a generation runs: lost nodes, failures, nodes that join, its end. Pure."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from .cluster_view import FAR_S, PROGRESS_S, ClusterView, Decision, carried, count, names
from .forming import forming_plan
from .leases import Sighting
from .notices import announce_growth, any_handles_notices, decide_under_notice, has_saved
from .records import Failure, FailureKind, Growth, Phase, Seat, State, World

EXPLAIN_S = 15.0
"""How long an agent may take to publish what a signal that ended its workers means: it may query a scheduler."""


def decide_running(now: ClusterView) -> Decision:
    """Form the next generation, finish the run, or leave the world alone."""
    decision = _decide(now)
    plan = decision.plan
    if plan is None or plan.phase is not Phase.FORMING:
        return decision
    ran_s = now.now_s - now.clock.since_s
    known = msgspec.structs.replace(  # of the nodes, whatever has ended the generation
        plan,
        losses={} if ran_s >= PROGRESS_S else plan.losses,  # those of now are counted when the next is sealed
        start_failures=_start_failures(now),
        avoid_bootstrap=_avoid_bootstrap(now),
    )
    return replace(decision, plan=known)


def _decide(now: ClusterView) -> Decision:
    world = now.plan.world
    assert world is not None  # a running plan always has one
    waiting = [seat for seat in world.seats if not _succeeded(now, seat)]
    if not waiting:
        return _finish(now, world)
    busy = [seat for seat in waiting if not has_saved(now, seat)]
    ending = now.plan.notice is not None and now.plan.notice.ends
    # A node that has left for the run's end has done its part: it does not count as lost.
    lost = [seat for seat in (busy if ending else waiting) if _is_lost(now, seat)]
    failed = _first_failure(now, waiting) or _late_start(now, lost)
    leaving = [seat for seat in waiting if _is_in_state(now, seat, State.LEAVING, State.LEFT)]
    dropped = [seat for seat in waiting if _dropped_out(now, seat)]
    if lost or failed or leaving or dropped:
        return _reform(now, lost, failed, leaving, dropped)
    slow = [seat for seat in world.seats if _is_slow(now, seat)]
    if slow:
        who = names(seat.node_id for seat in slow)
        limit = f"did not start its workers within {now.policy.start_timeout_s:g} s (--start-timeout)"
        return Decision(f"{who} did not start in time", revoke={seat.incarnation: limit for seat in slow})
    kept = _keep_successes(now, world)
    if kept is not None:
        return kept
    if now.plan.notice is not None:
        return decide_under_notice(
            now, world, busy, tuple(node.member.node_id for node in _waiting_to_join(now, world))
        )
    interrupted = [seat for seat in waiting if _interrupted(now, seat)]
    if interrupted:
        return _await_explanation(now, interrupted)
    if len(busy) < len(waiting):  # workers left although no notice is given (any more)
        who = names(seat.node_id for seat in waiting if seat not in busy)
        return Decision(
            f"the workers of {who} left", forming_plan(now.plan, f"the workers of {who} left", free=True)
        )
    return _admit(now, world)


def whole_world_runs(now: ClusterView) -> bool:
    """Return whether the workers of all nodes were started, and none is known to have failed."""
    started = (State.RUNNING, State.SUCCEEDED, State.SAVED)
    seats = now.plan.world.seats if now.plan.world is not None else ()
    return all(_succeeded(now, seat) or _is_now_in_state(now, seat, *started) for seat in seats)


def _is_now_in_state(now: ClusterView, seat: Seat, *states: State) -> bool:
    known = now.sighting(seat)
    return known is not None and known.member.state in states and _is_of_this_generation(now, known)


def _succeeded(now: ClusterView, seat: Seat) -> bool:
    return _is_now_in_state(now, seat, State.SUCCEEDED) or seat.incarnation in now.plan.succeeded


def _is_of_this_generation(now: ClusterView, known: Sighting) -> bool:
    return known.member.generation == now.plan.generation


def _is_lost(now: ClusterView, seat: Seat) -> bool:
    """Return whether its lease was revoked, or is over without a registration in this store."""
    known = now.sighting(seat)
    if known is None:
        return now.now_s >= now.ledger.born_s + now.policy.lease_ttl_s
    return not known.alive


def _is_in_state(now: ClusterView, seat: Seat, *states: State) -> bool:
    known = now.sighting(seat)
    return known is not None and known.member.state in states


def _dropped_out(now: ClusterView, seat: Seat) -> bool:
    """Return whether its record is of a later generation: it does not run this one any more."""
    known = now.sighting(seat)
    return known is not None and known.member.generation > now.plan.generation


def _is_slow(now: ClusterView, seat: Seat) -> bool:
    known = now.sighting(seat)
    late = now.now_s >= now.clock.since_s + now.policy.start_timeout_s
    return late and known is not None and known.member.state is State.READY


def _first_failure(now: ClusterView, seats: list[Seat]) -> tuple[Seat, Failure] | None:
    for seat in seats:
        known = now.sighting(seat)
        if known is None or known.member.state is not State.FAILED or not _is_of_this_generation(now, known):
            continue
        failure = known.member.failure or Failure(
            FailureKind.WORKER, f"{seat.node_id} failed without giving a reason"
        )
        return seat, failure
    return None


def _late_start(now: ClusterView, lost: list[Seat]) -> tuple[Seat, Failure] | None:
    """Return a node whose lease was revoked only because it had not started its workers in time."""
    for seat in lost:
        if _is_slow(now, seat):
            summary = (
                f"{seat.node_id} did not start its {count(seat.slots, 'worker')} within "
                f"{now.policy.start_timeout_s:g} s; start fewer there (--nproc-per-node), or allow more time "
                "(--start-timeout)"
            )
            return seat, Failure(FailureKind.START, summary)
    return None


def _interrupted(now: ClusterView, seat: Seat) -> bool:
    """Return whether a signal that makes its agent stop has ended workers of this seat."""
    known = now.sighting(seat)
    failure = known.member.failure if known is not None and _is_of_this_generation(now, known) else None
    return failure is not None and failure.kind is FailureKind.INTERRUPTED


def _any_interrupted(now: ClusterView) -> bool:
    """Return whether a signal ended workers: what fails elsewhere then fails because of that."""
    return now.plan.world is not None and any(_interrupted(now, seat) for seat in now.plan.world.seats)


def _await_explanation(now: ClusterView, interrupted: list[Seat]) -> Decision:
    """Wait until the agent publishes what the signal means: others may still save."""
    who = names(seat.node_id for seat in interrupted)
    if now.clock.interrupted_since_s is None:
        now.clock.interrupted_since_s = now.now_s
    until_s = now.clock.interrupted_since_s + EXPLAIN_S
    if now.now_s < until_s:
        return Decision(
            f"a signal terminated workers of {who}; waiting for a drain or stop request", wake_s=until_s
        )
    reason = f"a signal terminated workers of {who}"
    return Decision(reason, forming_plan(now.plan, reason, free=True))


def _reform(
    now: ClusterView,
    lost: list[Seat],
    failed: tuple[Seat, Failure] | None,
    leaving: list[Seat],
    dropped: list[Seat],
) -> Decision:
    reasons: list[str] = []
    if failed is not None:
        reasons.append(failed[1].summary)
    for seats, state in ((lost, "lost"), (leaving, "leaving"), (dropped, "dropped out")):
        if seats:
            reasons.append(f"{names(seat.node_id for seat in seats)} {state}")
    plan = now.plan
    reason = "; ".join(reasons)
    none_started = plan.world is not None and all(
        seat in lost and _is_slow(now, seat) for seat in plan.world.seats
    )
    return Decision(
        reason,
        forming_plan(
            plan,
            reason,
            failure=failed[1] if failed else None,
            failed_node=failed[0].node_id if failed else None,
            lost=tuple(seat.node_id for seat in lost),
            free=(bool(lost or leaving or dropped) and not none_started) or _any_interrupted(now),
            notice=carried(now),
        ),
    )


def _start_failures(now: ClusterView) -> dict[str, int]:
    """Count a node's failures before user code ran; the count restarts at 0 when the node runs."""
    counts = dict(now.plan.start_failures)
    for seat in now.plan.world.seats if now.plan.world else ():
        known = now.sighting(seat)
        if known is None or not _is_of_this_generation(now, known):
            continue
        failure = known.member.failure
        before_user_code = failure is not None and failure.kind in (FailureKind.START, FailureKind.BOOTSTRAP)
        if known.member.state is State.FAILED and before_user_code:
            counts[seat.node_id] = counts.get(seat.node_id, 0) + 1
        elif known.member.state in (State.RUNNING, State.SUCCEEDED, State.SAVED, State.FAILED):
            counts.pop(seat.node_id, None)
    return counts


def _avoid_bootstrap(now: ClusterView) -> tuple[str, ...]:
    """Return the nodes whose bootstrap store was unreachable since all of a world ran."""
    unreachable = list(now.plan.avoid_bootstrap) if now.clock.world_runs_since_s is None else []
    for seat in now.plan.world.seats if now.plan.world else ():
        known = now.sighting(seat)
        failure = known.member.failure if known is not None and _is_of_this_generation(now, known) else None
        if failure is not None and failure.unreachable_node and failure.unreachable_node not in unreachable:
            unreachable.append(failure.unreachable_node)
    total = len(now.plan.world.seats) if now.plan.world else 0
    return tuple(unreachable) if len(unreachable) < total else ()


def _finish(now: ClusterView, world: World) -> Decision:
    reason = f"generation {world.generation} succeeded on {count(len(world.seats), 'node')}"
    return Decision(
        reason,
        msgspec.structs.replace(now.plan, version=now.plan.version + 1, phase=Phase.FINISHED, reason=reason),
    )


def _keep_successes(now: ClusterView, world: World) -> Decision | None:
    """Record the success of nodes that are gone, before their records are removed."""
    gone = [
        seat.incarnation
        for seat in world.seats
        if seat.incarnation not in now.plan.succeeded and _succeeded(now, seat) and _is_lost(now, seat)
    ]
    if not gone:
        return None
    who = names(seat.node_id for seat in world.seats if seat.incarnation in gone)
    reason = f"{who} succeeded and left"
    plan = msgspec.structs.replace(
        now.plan, version=now.plan.version + 1, reason=reason[:512], succeeded=(*now.plan.succeeded, *gone)
    )
    return Decision(reason, plan)


def _admit(now: ClusterView, world: World) -> Decision:
    """Let waiting nodes in, in batches: when the newest has waited for long enough."""
    start_by_s = now.clock.since_s + now.policy.start_timeout_s
    starting = [seat for seat in world.seats if _is_in_state(now, seat, State.READY)]
    wake_s = start_by_s if starting else FAR_S
    steady = Decision(
        f"{count(len(world.seats), 'node')}, {count(world.world_size, 'worker')} running", wake_s=wake_s
    )
    if starting or any(_succeeded(now, seat) for seat in world.seats):
        return steady  # not yet running everywhere, or already ending
    handles_notices = any_handles_notices(now, world)
    candidates = _candidates(now, world, handles_notices)
    if not candidates:
        return steady
    open_s = [_open_s(now, node, handles_notices) for node in candidates]
    allowed = [node for node, at_s in zip(candidates, open_s, strict=True) if at_s <= now.now_s]
    batch_s = _batch_s(now, handles_notices)
    if not allowed or any(now.now_s < at_s <= now.now_s + batch_s for at_s in open_s):
        later = min((at_s for at_s in open_s if at_s > now.now_s), default=FAR_S)
        return Decision(
            f"{names(node.member.node_id for node in candidates)} will join soon", wake_s=min(wake_s, later)
        )
    if now.policy.fit(len(world.seats) + len(allowed)) <= len(world.seats):
        return steady  # one more would be left over
    return (
        announce_growth(now, [node.member.node_id for node in allowed])
        if handles_notices
        else _let_in(now, allowed)
    )


def _candidates(now: ClusterView, world: World, handles_notices: bool) -> list[Sighting]:
    """Return nodes that may join now: by the growth policy, unless a node only returns to a seat that it had."""
    grow = now.policy.grow
    grows = grow is Growth.AFTER or (grow is Growth.AT_NOTICE and handles_notices)
    return [node for node in _waiting_to_join(now, world) if grows or _comes_back(now, node)]


def _comes_back(now: ClusterView, node: Sighting) -> bool:
    return node.member.node_id in now.plan.order


def _open_s(now: ClusterView, node: Sighting, handles_notices: bool) -> float:
    """Return when a waiting node may be let in."""
    delay_s = now.policy.settle_s if _comes_back(now, node) else _batch_s(now, handles_notices)
    return max(node.first_seen_s + delay_s, now.penalty_until_s(node))


def _batch_s(now: ClusterView, handles_notices: bool) -> float:
    """Return how long after the last arrival the world grows: training that handles notices loses nothing by it."""
    return now.policy.settle_s if handles_notices else max(now.policy.settle_s, now.policy.grow_delay_s)


def _let_in(now: ClusterView, allowed: list[Sighting]) -> Decision:
    who = names(node.member.node_id for node in allowed)
    reason = f"{who} joined" if len(allowed) == 1 else f"{who} join"
    return Decision(
        reason,
        forming_plan(
            now.plan,
            reason,
            joining=tuple(node.member.node_id for node in allowed),
        ),
    )


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
        and node.member.incarnation not in now.plan.leaving
        and now.plan.start_failures.get(node.member.node_id, 0) < 2
    ]
