"""The coordinator's rules while a generation is forming: when it is sealed, and with which nodes. Pure.

The order of the questions is the protocol: (1) are all nodes cleared that could still run an older generation? (2)
is the failure that ended the previous generation charged, and is the budget exhausted? (3) are enough nodes ready,
and are there more to wait for?
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from . import budget
from .cluster_view import ClusterView, Decision, clearance_deadlines, count, names, node_names, stopped
from .leases import FAR_S, Sighting
from .records import LONGEST_TEXT, Failure, FailureKind, Growth, Member, Phase, Plan, Seat, State, World

STOP_SLACK_S = 5.0
"""The time beyond what it announced that a node may take to stop its workers before it is revoked."""

MAX_REMEMBERED_NODES = 4096
"""The number of nodes that once had a seat and keep their position in the order."""

_DIGITS = re.compile(r"(\d+)")


def decide_forming(now: ClusterView) -> Decision:
    """Seal the generation, fail the run, or wait, with the reason."""
    waits = clearance_deadlines(now)
    if waits:
        return await_clearing(now, waits)
    failure = now.plan.failure if _charge(now) else None
    charge, end = failure is not None, budget.end_reason(now.plan, failure.words) if failure else ""
    if end:
        return _fail(now, end, failure)
    if now.plan.notice is not None and now.notice_left_s <= 0:
        return Decision.to_publish(stopped(now, now.plan.following(), now.plan.notice))
    chosen = _choose(now)
    fitting = now.policy.fit(len(chosen))
    if not fitting:
        return _await_more(now, chosen)
    if now.clock.enough_since_s is None:
        now.clock.enough_since_s = now.now_s
    until_s = _await_others_until(now, chosen, now.clock.enough_since_s)
    if len(chosen) < now.policy.max_nodes and now.now_s < until_s:
        return _await_others(now, chosen, until_s)
    # A run that is to end does not pause: its workers have little time left to save.
    pause_s = budget.pause_s(now.plan) if charge and now.plan.notice is None else 0.0
    if now.now_s < now.clock.since_s + pause_s:
        many = count(now.plan.budget.in_a_row + 1, "failure")
        reason = f"restarting in {pause_s:g} s, after {many} in a row without progress"
        return Decision(reason, wake_s=now.clock.since_s + pause_s)
    chosen = _with_a_host(now, chosen[:fitting])
    if all(node.member.bootstrap is None for node in chosen):
        return _await_offer(now, chosen, now.clock.enough_since_s + now.policy.join_timeout_s)
    return _seal(now, chosen, charge=charge)


def await_clearing(now: ClusterView, waits: dict[str, float]) -> Decision:
    """Wait while workers of an older generation may run.

    Args:
        now: the cluster view.
        waits: the seats to wait for, from :func:`~.cluster_view.clearance_deadlines`.
    """
    revoke: dict[str, str] = {}
    wake_s = FAR_S
    for incarnation, clear_s in waits.items():
        if clear_s != FAR_S:
            wake_s = min(wake_s, clear_s)
            continue
        limit_s = now.ledger.sightings[incarnation].member.stop_s + STOP_SLACK_S
        stop_by_s = now.clock.since_s + limit_s
        if now.now_s >= stop_by_s:
            revoke[incarnation] = f"did not stop its workers within {limit_s:g} s"
        wake_s = min(wake_s, stop_by_s)
    return Decision(_awaited_ends(now, waits), revoke=revoke, wake_s=wake_s)


def _awaited_ends(now: ClusterView, waits: dict[str, float]) -> str:
    """Return in words what ends these waits: an agent may stop its workers, one that was killed may not."""
    seats = [seat for seat in now.plan.uncleared if seat.incarnation in waits]
    stopping = [seat for seat in seats if waits[seat.incarnation] == FAR_S]
    gone = [seat for seat in seats if waits[seat.incarnation] != FAR_S]
    stop = (
        f"waiting for the workers of {node_names(stopping)} to stop or their lease to expire"
        if stopping
        else ""
    )
    expire = f"waiting for the lease of {node_names(gone)} to expire" if gone else ""
    return "; ".join(filter(None, (stop, expire)))


def _charge(now: ClusterView) -> bool:
    """Return whether the failure that ended the previous generation counts against the budget.

    Not when a participant was lost, was restarted or left: then the others' collectives fail because a
    peer vanished. Not when no user code ran, unless the node that cannot start cannot be spared either: the run could
    go on like this for ever.
    """
    failure = now.plan.failure
    if failure is None or now.plan.free:
        return False
    known = [now.ledger.sightings.get(seat.incarnation) for seat in now.plan.uncleared]
    if any(node is None or not node.alive or node.member.is_leaving for node in known):
        return False
    if failure.kind in (FailureKind.WORKER, FailureKind.HANG):
        return True
    is_stuck = now.plan.start_failures.get(now.plan.failed_node or "", 0) >= 2
    others = [node for node in now.ready() if not now.held_back(node)]
    return is_stuck and not (now.policy.fit(len(others)) and any(node.member.bootstrap for node in others))


def _fail(now: ClusterView, reason: str, failure: Failure | None) -> Decision:
    plan = now.plan.following(reason, phase=Phase.FAILED, failure=failure, uncleared=())
    return Decision.to_publish(plan)


def _choose(now: ClusterView) -> list[Sighting]:
    """Return the participants, at most max nodes: those of the previous world first, then by seating order.

    Nodes that keep getting lost or cannot start are left out while enough others remain; then those come first that
    did so least often, so that none of them is preferred for ever.
    """
    seated = {seat.node_id for seat in now.plan.seats}
    by_id = {node.member.node_id: node for node in now.ready()}
    ordered = [
        by_id[m.node_id] for m in seating_order((node.member for node in by_id.values()), now.plan.order)
    ]
    good = [node for node in ordered if not now.held_back(node)]
    spare = sorted((node for node in ordered if now.held_back(node)), key=now.strikes)
    chosen = sorted(good, key=lambda node: node.member.node_id not in seated)[: now.policy.max_nodes]
    if now.policy.fit(len(chosen)):
        return chosen
    missing = now.policy.least_fit(len(chosen)) - len(chosen)
    return chosen + spare[:missing]


def _with_a_host(now: ClusterView, chosen: list[Sighting]) -> list[Sighting]:
    """Return these nodes; where none of them offers a bootstrap store, one makes room for a node that does.

    A node that is held back is better than none.
    """
    if any(node.member.bootstrap is not None for node in chosen):
        return chosen
    hosts = sorted((node for node in now.ready() if node.member.bootstrap is not None), key=now.held_back)
    return hosts[:1] + chosen[:-1] if hosts else chosen


def _await_offer(now: ClusterView, chosen: list[Sighting], until_s: float) -> Decision:
    """Wait, with a limit, where no node can offer a bootstrap store; each tries again with its renewals."""
    failures = [node.member.failure.summary for node in chosen if node.member.failure is not None]
    why = "; ".join(failures) or "no reason given"
    if now.now_s >= until_s:
        limit_s = now.policy.join_timeout_s
        reason = f"no node could offer a bootstrap store within {limit_s:g} s: {why}"
        return _fail(now, reason, Failure(FailureKind.BOOTSTRAP, reason[:LONGEST_TEXT]))
    return Decision(f"waiting for a node that can offer a bootstrap store: {why}", wake_s=until_s)


def _await_more(now: ClusterView, chosen: list[Sighting]) -> Decision:
    """Wait, with a limit, where there are fewer nodes than the minimum."""
    now.clock.enough_since_s = None
    came = _came(chosen) or "none"
    least = now.policy.least_fit(len(chosen))
    missing = least - len(chosen)
    warming = _warming(now)
    if now.policy.fit(len(chosen) + len(warming)):
        now.clock.warming_s = now.now_s
        return Decision(f"waiting for the workers of {node_names(warming)} to start")
    until_s = (now.clock.warming_s or now.clock.since_s) + now.policy.join_timeout_s
    if now.now_s >= until_s:
        reason = (
            f"only {len(chosen)} of at least {least} nodes joined within {now.policy.join_timeout_s:g} s "
            f"({came}); {missing} more needed{_other_minimum(now, chosen)}"
        )
        return _fail(now, reason, Failure(FailureKind.TOO_FEW, reason[:LONGEST_TEXT]))
    return Decision(
        f"waiting for {count(missing, 'more node')} (at least {least} required); joined: {came}",
        wake_s=until_s,
        lacks_nodes=True,
        joined=tuple(node.member.node_id for node in chosen),
    )


def _came(chosen: list[Sighting]) -> str:
    return names(f"{node.member.node_id} ({count(node.member.slots, 'worker')})" for node in chosen)


def _await_others(now: ClusterView, chosen: list[Sighting], until_s: float) -> Decision:
    """Wait for more nodes than those chosen, which are enough."""
    if _has_settled_before(now, chosen):
        reason = f"{node_names(chosen)} ready; waiting a moment for {node_names(_coming(now, chosen))}"
        return Decision(reason, wake_s=until_s)
    return Decision(
        f"{len(chosen)} of up to {now.policy.max_nodes} nodes have joined: {_came(chosen)}; the workers start "
        f"when no other node has come for {now.policy.settle_s:g} s (--settle)",
        wake_s=until_s,
        lacks_nodes=now.plan.world is None,
        joined=tuple(node.member.node_id for node in chosen),
    )


def _other_minimum(now: ClusterView, chosen: list[Sighting]) -> str:
    """Return which nodes were started with another minimum than the run's, which is that of the first node."""
    ours = now.policy.min_nodes
    others = names(
        f"{node.member.node_id} with {node.member.policy.min_nodes}"
        for node in chosen
        if node.member.policy.min_nodes != ours
    )
    return others and f"; {others} as the minimum of --nnodes, the run has {ours}: start all with the same"


def _warming(now: ClusterView) -> list[Sighting]:
    """Return nodes that are not ready because workers of theirs are being started apart from any world."""
    nodes = now.by_node.values()
    return [
        node for node in nodes if node.member.warms_up and node.member.incarnation not in now.plan.leaving
    ]


def _await_others_until(now: ClusterView, chosen: list[Sighting], enough_s: float) -> float:
    """Return until when to wait for more nodes than those chosen; in the past if there are none to wait for."""
    coming = _coming(now, chosen)
    warming = {node.member.node_id for node in coming if node.member.warms_up}
    if now.plan.joining and not warming.isdisjoint(seat.node_id for seat in now.plan.seats):
        # Without those that gave way to others, these would be the next to give way to them, and so on for ever.
        return now.clock.since_s + now.policy.join_timeout_s
    cap_s = enough_s + 3 * now.policy.settle_s
    if warming and now.plan.world is None and now.policy.grow is not Growth.AFTER:
        return now.clock.since_s + now.policy.join_timeout_s  # it could not join later
    if warming:
        return cap_s
    if not _has_settled_before(now, chosen):
        arrivals = [now.ledger.nodes_since_s.get(node.member.node_id, 0.0) for node in [*chosen, *coming]]
        return min(cap_s, max(arrivals) + now.policy.settle_s)
    if not coming:  # survivors wait only for nodes that are registered
        return now.now_s
    until_s = min(cap_s, now.clock.since_s + now.policy.join_wait_s)
    if any(node.member.node_id in now.plan.joining for node in coming):
        # Nodes for which a running world was ended get the time of a lease.
        return max(until_s, now.clock.since_s + now.policy.lease_ttl_s)
    return until_s


def _coming(now: ClusterView, chosen: list[Sighting]) -> list[Sighting]:
    """Return the nodes besides those chosen that are registered, and may become ready, as far as they are waited for.

    A node that warms up joins a running world at hardly any cost. It is waited for only before the first world, if all
    had to warm up, or if it gave way to others.
    """
    here = {node.member.node_id for node in chosen}
    awaits_warming = now.clock.warming_s is not None or now.plan.world is None or bool(now.plan.joining)
    return [
        node
        for node in now.by_node.values()
        if node.member.node_id not in here
        and node.member.state not in (State.LEAVING, State.STOPPED)
        and node.member.incarnation not in now.plan.leaving
        and not now.is_ready(node)
        and not now.held_back(node)
        and (awaits_warming or not node.member.warms_up)
    ]


def _has_settled_before(now: ClusterView, chosen: list[Sighting]) -> bool:
    """Return whether a node of the last world is among those chosen: only a first world waits for --settle."""
    return not {seat.node_id for seat in now.plan.seats}.isdisjoint(node.member.node_id for node in chosen)


def _seal(now: ClusterView, chosen: list[Sighting], *, charge: bool) -> Decision:
    plan = budget.charged(now.plan) if charge else budget.not_charged(now.plan)
    ordered = seating_order((node.member for node in chosen), plan.order)
    seats = seat_members(ordered)
    offers = [member for member in ordered if member.bootstrap is not None]
    host = next((member for member in offers if member.node_id not in plan.avoid_bootstrap), offers[0])
    assert host.bootstrap is not None  # filtered above
    world = World(plan.generation, seats, host.bootstrap, host.node_id)
    reason = f"{count(len(seats), 'node')}, {count(world.world_size, 'worker')}"
    if plan.failure is not None:
        reason += f"; {_cost(plan) if charge else 'restart not charged'}"
    job = plan.policy.job.including(member.policy.job for member in ordered)
    return Decision.to_publish(
        plan.following(
            reason,
            phase=Phase.RUNNING,
            world=world,
            policy=msgspec.structs.replace(plan.policy, job=job),
            uncleared=(),
            failure=None,
            failed_node=None,
            lost=(),
            free=False,
            succeeded=(),
            joining=(),
            losses=_losses(now, len(seats)),
            order=remember(plan.order, seats),
            notice=now.carried_notice,
        )
    )


def _cost(plan: Plan) -> str:
    """Return what a charged failure means for the budget, in words."""
    forgiven, most = plan.budget.forgiven, plan.policy.max_restarts
    cost = f"restart {plan.charged - forgiven} of {most}"
    return f"{cost}, {count(forgiven, 'earlier one')} forgiven" if forgiven else cost


def _losses(now: ClusterView, nodes: int) -> dict[str, int]:
    """Count as lost a node for which a running world was ended, and which then did not take its seat."""
    losses = dict(now.losses)
    came = {node.member.node_id for node in now.ready()}
    if nodes < now.policy.max_nodes:
        for node_id in sorted(set(now.plan.joining) - came):
            losses[node_id] = losses.get(node_id, 0) + 1
    return losses


# -- the order of the nodes --------------------------------------------------------------------


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return the sort key under which ``n2`` comes before ``n10``.

    Sorting hosts as plain strings is known to tear neighbouring machines apart in the ring.
    """
    parts = _DIGITS.split(name)
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts if part)


def seating_order(members: Iterable[Member], remembered: Sequence[str]) -> list[Member]:
    """Return members in rank order: those that were seated before in their old order, then the new ones.

    New nodes are ordered by their preferred rank, if any, then by natural order of their names.
    """
    position = {node_id: index for index, node_id in enumerate(remembered)}

    def key(member: Member) -> tuple[int, int, int, tuple[tuple[int, int, str], ...]]:
        wish = member.preferred_rank
        if member.node_id in position:
            return (0, position[member.node_id], 0, ())
        return (1, 0 if wish is not None else 1, wish or 0, natural_key(member.node_id))

    return sorted(members, key=key)


def seat_members(ordered: Sequence[Member]) -> tuple[Seat, ...]:
    """Return seats for members in this order; ranks are prefix sums of their slots."""
    seats: list[Seat] = []
    rank = 0
    for member in ordered:
        seats.append(
            Seat(member.node_id, member.incarnation, member.address, member.slots, rank, member.role)
        )
        rank += member.slots
    return tuple(seats)


def remember(remembered: Sequence[str], seats: Iterable[Seat]) -> tuple[str, ...]:
    """Return the order to keep after these seats were given: known nodes stay, new ones go to the end."""
    known = set(remembered)
    order = [*remembered, *(seat.node_id for seat in seats if seat.node_id not in known)]
    return tuple(order[-MAX_REMEMBERED_NODES:])
