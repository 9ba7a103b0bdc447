"""The coordinator's rules for a graceful shutdown: requests, notices to workers, and when a notice is over. Pure.

A notice always goes to all workers: a rank that exits alone leaves the others in a collective that never ends. So
all workers of the world get it, save at the same step, and exit; then the run ends, or continues without the nodes
that were to leave, or with the ones that waited. A run whose last node leaves ends. Workers that are still running at
the deadline are stopped.
"""

from __future__ import annotations

import msgspec

from .cluster_view import ClusterView, Decision, names, stopped
from .forming import forming_plan
from .leases import Sighting
from .records import Cause, Notice, Phase, Plan, Seat, State, StopRequest, World

PROMPT = frozenset({Cause.DRAIN, Cause.GROW, Cause.OPERATOR})
"""Causes for which workers that do not handle notices are stopped at once. For the others they keep their time."""


def acknowledge(now: ClusterView) -> Decision | None:
    """Apply the stop requests that are new since the last call; None if there are none."""
    requests = [
        (node.member.incarnation, node.member.stop_request)
        for node in now.ledger.sightings.values()
        if node.alive and node.member.state is not State.LEFT and node.member.stop_request is not None
        if _is_of_this_life(now, node.member.stop_request) and not _is_of_a_second_agent(now, node)
    ]
    new = [
        (key, stop_request)
        for key, stop_request in requests
        if stop_request.serial > now.plan.acknowledged.get(key, 0)
        and not _may_return(now, stop_request.leaver)
    ]
    if not new:
        return None
    acknowledged = {
        key: serial for key, serial in now.plan.acknowledged.items() if key in now.ledger.sightings
    }
    plan = msgspec.structs.replace(
        now.plan, acknowledged={**acknowledged, **{key: stop_request.serial for key, stop_request in new}}
    )
    for key, stop_request in new:
        plan = _follow(now, plan, key, stop_request)
    reason = "; ".join(dict.fromkeys(stop_request.words for _, stop_request in new))
    reason = plan.reason if plan.is_terminal else reason
    return Decision(reason, msgspec.structs.replace(plan, version=now.plan.version + 1, reason=reason[:512]))


def _is_of_this_life(now: ClusterView, stop_request: StopRequest) -> bool:
    """Return whether the request is not from before the run was resumed, by a node that was disconnected meanwhile."""
    return stop_request.life >= now.plan.life


def _is_of_a_second_agent(now: ClusterView, node: Sighting) -> bool:
    """Return whether an agent with the node id of another asks to leave: that would remove the other's node."""
    stop_request, holder = node.member.stop_request, now.by_node.get(node.member.node_id)
    leaves = stop_request is not None and stop_request.leaver == node.member.node_id
    return leaves and holder is not None and holder.member.incarnation != node.member.incarnation


def _may_return(now: ClusterView, node_id: str | None) -> bool:
    """Return whether this node has lost its lease and may still register again: then it is asked to leave, not now."""
    if now.plan.is_terminal or node_id in now.by_node:
        return False
    return any(
        node.member.node_id == node_id
        and node.member.state is not State.LEFT
        and node.member.incarnation not in now.plan.refused
        and (now.ledger.fenced_s(node.member.incarnation, now.policy) or 0.0) > now.now_s
        for node in now.ledger.sightings.values()
    )


def _follow(now: ClusterView, plan: Plan, requester: str, stop_request: StopRequest) -> Plan:
    if plan.is_terminal:
        return plan
    if stop_request.leaver is None:
        if plan.phase is Phase.FORMING:  # no workers run, or they are being stopped already
            notice = Notice(now.plan.version + 1, stop_request.cause, 0.0, stop_request.words, ends=True)
            return stopped(now, plan, notice)
        return _give(now, plan, stop_request)
    leaver = now.by_node.get(stop_request.leaver)
    if leaver is None or leaver.member.incarnation in plan.leaving:
        return plan
    if _leaves_none(now, plan, leaver):
        reason = f"{stop_request.words}; no other node can continue the run"[:512]
        return _follow(now, plan, requester, msgspec.structs.replace(stop_request, leaver=None, words=reason))
    leavers = [leaver.member.incarnation]
    if requester != leaver.member.incarnation:  # who asks for itself knows which one it is
        leavers += _others_alive(now, plan, leaver)
    plan = msgspec.structs.replace(plan, leaving=(*plan.leaving, *leavers))
    return _give(now, plan, stop_request) if _runs(now, leaver) else plan


def _others_alive(now: ClusterView, plan: Plan, leaver: Sighting) -> list[str]:
    """Return other incarnations of the node that count as alive.

    A new coordinator may take the predecessor of a node that was restarted for its current incarnation.
    """
    return [
        node.member.incarnation
        for node in now.ledger.sightings.values()
        if node is not leaver
        and node.member.node_id == leaver.member.node_id
        and node.alive
        and node.member.state is not State.LEFT
        and node.member.incarnation not in (*plan.refused, *plan.leaving)
    ]


def _leaves_none(now: ClusterView, plan: Plan, leaver: Sighting) -> bool:
    """Return whether no node would be left to continue the run: none is alive, may return or may register."""
    staying = [
        node_id
        for node_id, node in now.by_node.items()
        if node is not leaver and node.member.incarnation not in plan.leaving
    ]
    lost = {node.member.node_id for node in now.ledger.sightings.values()} - {leaver.member.node_id}
    may_return = any(_may_return(now, node_id) for node_id in lost)
    return not staying and not may_return and not _may_register(now, leaver)


def _may_register(now: ClusterView, leaver: Sighting) -> bool:
    """Return whether another node of the world before may be alive and yet to register in this new store."""
    seats = (*now.plan.uncleared, *(now.plan.world.seats if now.plan.world is not None else ()))
    return any(
        seat.node_id != leaver.member.node_id
        and seat.incarnation not in now.ledger.sightings
        and (now.ledger.fenced_s(seat.incarnation, now.policy) or 0.0) > now.now_s
        for seat in seats
    )


def _runs(now: ClusterView, node: Sighting) -> bool:
    """Return whether its workers run, so that the others cannot continue without them."""
    world = now.plan.world
    return (
        now.plan.phase is Phase.RUNNING
        and node.member.state is not State.SUCCEEDED
        and world is not None
        and world.seat_of(node.member.incarnation) is not None
    )


def _give(now: ClusterView, plan: Plan, stop_request: StopRequest) -> Plan:
    """Give the workers a notice; it neither softens nor extends one that they have already."""
    known, ends, left_s = plan.notice, stop_request.leaver is None, stop_request.left_s
    cause, reason = stop_request.cause, stop_request.words
    if known is not None:
        left_s = min(left_s, now.notice_left_s)
        if known.ends and not ends:
            cause, reason, ends = known.cause, known.words, True
    notice = Notice(now.plan.version + 1, cause, left_s, reason, ends)
    return msgspec.structs.replace(plan, notice=notice)


def announce_growth(now: ClusterView, newcomers: list[str]) -> Decision:
    """Have the workers save before the nodes that wait are let in."""
    reason = f"{names(newcomers)} {'is' if len(newcomers) == 1 else 'are'} waiting to join"[:512]
    notice = Notice(now.plan.version + 1, Cause.GROW, now.policy.notice_s, reason)
    plan = msgspec.structs.replace(now.plan, version=now.plan.version + 1, reason=reason, notice=notice)
    return Decision(reason, plan)


def any_handles_notices(now: ClusterView, world: World) -> bool:
    """Return whether workers of this world are known to handle notices."""
    known = (now.sighting(seat) for seat in world.seats)
    return any(node is not None and node.member.handles_notices for node in known)


def has_saved(now: ClusterView, seat: Seat) -> bool:
    """Return whether the workers of this seat saved and left."""
    known = now.sighting(seat)
    return (
        known is not None
        and known.member.state is State.SAVED
        and known.member.generation == now.plan.generation
    )


def decide_under_notice(
    now: ClusterView, world: World, busy: list[Seat], joining: tuple[str, ...]
) -> Decision:
    """Wait until the workers of ``busy`` seats have left too, at most until the deadline; then go on.

    Args:
        now: the cluster view; its plan has a notice.
        world: the world that runs.
        busy: its seats whose workers have neither left nor succeeded.
        joining: nodes that wait to be let in.
    """
    notice = now.plan.notice
    assert notice is not None  # the caller looked
    until_s = now.clock.notice_ends_s
    if notice.cause in PROMPT and not any_handles_notices(now, world):
        until_s = now.now_s
    if busy and now.now_s < until_s:
        who = names(seat.node_id for seat in busy)
        return Decision(f"{notice.words}; waiting for the workers of {who} to save", wake_s=until_s)
    return after_notice(now, notice, joining)


def after_notice(now: ClusterView, notice: Notice, joining: tuple[str, ...] = ()) -> Decision:
    """Decide what follows a notice: all workers have exited, or the deadline has passed."""
    if notice.ends:
        return Decision(notice.words, stopped(now, now.plan, notice))
    plan = forming_plan(now.plan, notice.words, free=True, notice=None, joining=joining)
    return Decision(notice.words, plan)
