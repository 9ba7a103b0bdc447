"""The coordinator's rules while a generation is forming: when it is sealed, and with which nodes. Pure.

The order of the questions is the protocol: (1) are all nodes cleared that could still run an older generation? (2)
is the failure that ended the previous generation charged, and is the budget exhausted? (3) are enough nodes ready,
and are there more to wait for?
"""

from __future__ import annotations

import msgspec

from . import budget
from .cluster_view import (
    FAR_S,
    ClusterView,
    Decision,
    carried,
    clearance_deadlines,
    count,
    names,
    stopped,
    unproven,
)
from .leases import Sighting
from .ranks import remember, seat_members, seating_order
from .records import Failure, FailureKind, Member, Phase, Plan, State, World

STOP_SLACK_S = 5.0
"""How much longer than announced a node may take to stop its workers before it is revoked."""


def decide_forming(now: ClusterView) -> Decision:
    """Seal the generation, fail the run, or wait, with the reason."""
    waits = clearance_deadlines(now)
    if waits:
        return await_clearing(now, waits)
    failure = now.plan.failure if now.plan.uncleared and _charge(now) else None
    charge, end = failure is not None, budget.end_reason(now.plan, failure.words) if failure else ""
    if end:
        return _fail(now, end, failure)
    if now.plan.notice is not None and now.notice_left_s <= 0:
        return Decision(now.plan.notice.words, stopped(now, now.plan, now.plan.notice))
    ready = now.ready()
    chosen = _choose(now, ready)
    fitting = now.policy.fit(len(chosen))
    if not fitting:
        return _await_more(now, chosen)
    if now.clock.enough_since_s is None:
        now.clock.enough_since_s = now.now_s
    until_s, is_desired = _await_others_until(now, chosen)
    if len(chosen) < now.policy.max_nodes and now.now_s < until_s:
        if is_desired:
            return _await_desired(now, chosen, until_s)
        return Decision(
            f"{len(chosen)} of {_range(now)} nodes are ready; waiting for more nodes (--settle)",
            wake_s=until_s,
        )
    # A run that is to end does not pause: its workers have little time left to save.
    pause_s = budget.pause_s(now.plan) if charge and now.plan.notice is None else 0.0
    if now.now_s < now.clock.since_s + pause_s:
        many = count(now.plan.budget.in_a_row + 1, "failure")
        return Decision(
            f"restarting in {pause_s:g} s, after {many} in a row without progress",
            wake_s=now.clock.since_s + pause_s,
        )
    return _seal(now, _with_a_host(now, chosen[:fitting], ready), charge=charge)


def await_clearing(now: ClusterView, waits: dict[str, float]) -> Decision:
    """Wait while workers of an older generation may run.

    Args:
        now: the cluster view.
        waits: the seats to wait for, from :func:`~.cluster_view.clearance_deadlines`.
    """
    nodes = {seat.incarnation: seat.node_id for seat in now.plan.uncleared}
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
    who = names(nodes[key] for key in waits)
    return Decision(f"waiting for the workers of {who} to stop", revoke=revoke, wake_s=wake_s)


def _charge(now: ClusterView) -> bool:
    """Return whether the failure that ended the previous generation counts against the budget.

    Not when a participant was lost, was restarted or left: then the others' collectives fail because a
    peer vanished. Not when no user code ran, unless the node that cannot start cannot be spared either, or no node
    started in time: the run could go on like this for ever.
    """
    failure = now.plan.failure
    if failure is None or now.plan.free:
        return False
    if now.plan.lost:  # all of them, by starting too late: else the loss would be free
        return True
    if any(_departed(now, seat.incarnation) for seat in now.plan.uncleared):
        return False
    if failure.kind in (FailureKind.WORKER, FailureKind.HANG):
        return True
    stuck = now.plan.start_failures.get(now.plan.failed_node or "", 0) >= 2
    others = [node for node in now.ready() if not now.held_back(node)]
    return stuck and not (now.policy.fit(len(others)) and any(node.member.bootstrap for node in others))


def _departed(now: ClusterView, incarnation: str) -> bool:
    known = now.ledger.sightings.get(incarnation)
    return known is None or not known.alive or known.member.state in (State.LEAVING, State.LEFT)


def _fail(now: ClusterView, reason: str, failure: Failure | None) -> Decision:
    plan = msgspec.structs.replace(
        now.plan,
        version=now.plan.version + 1,
        phase=Phase.FAILED,
        reason=reason[:512],
        failure=failure,
        uncleared=(),
    )
    return Decision(reason, plan)


def _choose(now: ClusterView, ready: list[Sighting]) -> list[Sighting]:
    """Return the participants, at most max nodes: those of the previous world first, then by seating order.

    Nodes that keep getting lost or cannot start are left out while enough others remain; then those come first that
    did so least often, so that none of them is preferred for ever.
    """
    seated = {seat.node_id for seat in now.plan.world.seats} if now.plan.world is not None else set()
    by_id = {node.member.node_id: node for node in ready}
    ordered = [by_id[m.node_id] for m in seating_order((node.member for node in ready), now.plan.order)]
    good = [node for node in ordered if not now.held_back(node)]
    spare = sorted((node for node in ordered if now.held_back(node)), key=now.strikes)
    staying = [node for node in good if node.member.node_id in seated]
    others = [node for node in good if node.member.node_id not in seated]
    chosen = (staying + others)[: now.policy.max_nodes]
    if now.policy.fit(len(chosen)):
        return chosen
    missing = now.policy.least_fit(len(chosen)) - len(chosen)
    return chosen + spare[:missing]


def _with_a_host(now: ClusterView, chosen: list[Sighting], ready: list[Sighting]) -> list[Sighting]:
    """Return these nodes; where none of them offers a bootstrap store, one makes room for a node that does.

    A node that is held back is better than none.
    """
    if any(node.member.bootstrap is not None for node in chosen):
        return chosen
    hosts = sorted((node for node in ready if node.member.bootstrap is not None), key=now.held_back)
    return hosts[:1] + chosen[:-1] if hosts else chosen


def _await_more(now: ClusterView, chosen: list[Sighting]) -> Decision:
    """Wait, with a limit, where there are fewer nodes than the minimum."""
    now.clock.enough_since_s = None
    came = _came(chosen)
    least = now.policy.least_fit(len(chosen))
    missing = least - len(chosen)
    until_s = now.clock.since_s + now.policy.join_timeout_s
    if now.now_s >= until_s:
        reason = (
            f"only {len(chosen)} of at least {least} nodes joined within {now.policy.join_timeout_s:g} s "
            f"({came}); {missing} more needed{_other_minimum(now, chosen)}"
        )
        return _fail(now, reason, Failure(FailureKind.TOO_FEW, reason[:512]))
    return Decision(
        f"waiting for {count(missing, 'more node')} (at least {least} required); joined: {came}",
        wake_s=until_s,
        lacks_nodes=True,
        joined=tuple(node.member.node_id for node in chosen),
    )


def _await_desired(now: ClusterView, chosen: list[Sighting], until_s: float) -> Decision:
    """Wait for a while where there are enough nodes, but fewer than desired."""
    desired, wait_s = now.policy.desired_nodes, now.policy.desired_wait_s
    return Decision(
        f"waiting for {count(desired - len(chosen), 'more node')} (--desired-nodes {desired}), at most for "
        f"{wait_s:g} s (--desired-wait), then starting without; joined: {_came(chosen)}",
        wake_s=until_s,
        lacks_nodes=True,
        joined=tuple(node.member.node_id for node in chosen),
    )


def _came(chosen: list[Sighting]) -> str:
    return names(f"{node.member.node_id} ({count(node.member.slots, 'worker')})" for node in chosen) or "none"


def _other_minimum(now: ClusterView, chosen: list[Sighting]) -> str:
    """Return which nodes were started with another minimum than the run's, which is that of the first node."""
    ours = now.policy.min_nodes
    others = names(
        f"{node.member.node_id} with {node.member.policy.min_nodes}"
        for node in chosen
        if node.member.policy.min_nodes != ours
    )
    return others and f"; {others} as the minimum of --nnodes, the run has {ours}: start all with the same"


def _await_others_until(now: ClusterView, chosen: list[Sighting]) -> tuple[float, bool]:
    """Return until when to wait for more nodes than those chosen, and whether that is because more are desired.

    In the past if there are none to wait for.
    """
    here = {node.member.node_id for node in chosen}
    coming = [
        node
        for node in now.by_node.values()
        if node.member.node_id not in here
        and node.member.state not in (State.LEAVING, State.STOPPED)
        and node.member.incarnation not in now.plan.leaving
        and not (node.member.state is State.READY and node.member.generation == now.plan.generation)
        and not now.held_back(node)
    ]
    enough_s = now.clock.enough_since_s if now.clock.enough_since_s is not None else now.now_s
    cap_s = enough_s + 3 * now.policy.settle_s
    seated = {seat.node_id for seat in now.plan.world.seats} if now.plan.world is not None else set()
    if seated & here:  # a re-formation: survivors wait only for nodes that are registered
        return _reforms_at(now, coming, cap_s), False
    arrivals = [now.ledger.nodes_since_s.get(node.member.node_id, 0.0) for node in [*chosen, *coming]]
    settled_s = min(cap_s, max(arrivals) + now.policy.settle_s)
    desired_s = enough_s + now.policy.desired_wait_s
    if len(chosen) < now.policy.desired_nodes and desired_s > settled_s:
        return desired_s, True
    return settled_s, False


def _reforms_at(now: ClusterView, coming: list[Sighting], cap_s: float) -> float:
    """Return until when survivors wait for these. Nodes for which a running world was ended get the time of a lease."""
    if not coming:
        return now.now_s
    until_s = min(cap_s, now.clock.since_s + now.policy.settle_s)
    if any(node.member.node_id in now.plan.joining for node in coming):
        return max(until_s, now.clock.since_s + now.policy.lease_ttl_s)
    return until_s


def _seal(now: ClusterView, chosen: list[Sighting], *, charge: bool) -> Decision:
    plan = budget.charged(now.plan) if charge else budget.not_charged(now.plan)
    ordered = seating_order((node.member for node in chosen), plan.order)
    seats = seat_members(ordered)
    offers = [m for m in ordered if m.bootstrap is not None]
    preferred = [m for m in offers if m.node_id not in plan.avoid_bootstrap]
    if not offers:
        return _await_offer(now, ordered)
    host = (preferred or offers)[0]
    assert host.bootstrap is not None  # filtered above
    world = World(plan.generation, seats, host.bootstrap, host.node_id)
    reason = f"{count(len(seats), 'node')}, {count(world.world_size, 'worker')}"
    if plan.failure is not None:
        reason += f"; {_cost(plan) if charge else 'restart not charged'}"
    return Decision(
        reason,
        msgspec.structs.replace(
            plan,
            version=plan.version + 1,
            phase=Phase.RUNNING,
            reason=reason[:512],
            world=world,
            policy=msgspec.structs.replace(
                plan.policy, job=plan.policy.job.including(member.policy.job for member in ordered)
            ),
            uncleared=(),
            failure=None,
            failed_node=None,
            lost=(),
            free=False,
            succeeded=(),
            joining=(),
            losses=_losses(now, len(seats)),
            order=remember(plan.order, seats),
            notice=carried(now),
        ),
    )


def _await_offer(now: ClusterView, members: list[Member]) -> Decision:
    """Wait, with a limit, where no node can offer a bootstrap store; each tries again with its renewals."""
    why = (
        "; ".join(member.failure.summary for member in members if member.failure is not None)
        or "no reason given"
    )
    limit_s = now.policy.join_timeout_s
    assert now.clock.enough_since_s is not None  # there are enough nodes
    until_s = now.clock.enough_since_s + limit_s
    if now.now_s >= until_s:
        reason = f"no node could offer a bootstrap store within {limit_s:g} s: {why}"
        return _fail(now, reason, Failure(FailureKind.BOOTSTRAP, reason[:512]))
    return Decision(f"waiting for a node that can offer a bootstrap store: {why}", wake_s=until_s)


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


def _range(now: ClusterView) -> str:
    low, high = now.policy.min_nodes, now.policy.max_nodes
    return str(low) if low == high else f"{low} to {high}"


def forming_plan(plan: Plan, reason: str, **changes: object) -> Plan:
    """Return the plan that forms the generation after ``plan``'s; its world's seats are to be cleared first."""
    return msgspec.structs.replace(
        plan,
        version=plan.version + 1,
        phase=Phase.FORMING,
        generation=plan.generation + 1,
        reason=reason[:512],
        uncleared=unproven(plan),
        succeeded=(),
        **{"notice": None, "lost": (), **changes},
    )
