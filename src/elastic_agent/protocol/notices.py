"""The coordinator's rules for a graceful shutdown: requests, notices to workers, and when a notice is over. Pure.

A notice always goes to all workers: a rank that exits alone leaves the others in a collective that never ends. So
all workers of the world get it, save at the same step, and exit; then the run ends, or continues without the nodes
that were to leave, or with the ones that waited. A run whose last node leaves ends. Workers that are still running at
the deadline are stopped.
"""

from __future__ import annotations

import msgspec

from .cluster_view import ClusterView, Decision, node_names, stopped
from .leases import FAR_S, Sighting
from .records import LONGEST_TEXT, Cause, Notice, Phase, Plan, Seat, State, StopRequest

PROMPT = frozenset({Cause.DRAIN, Cause.GROW, Cause.OPERATOR})
"""Causes for which workers that do not handle notices are stopped at once. For the others they keep their time."""


def acknowledge(now: ClusterView) -> Decision | None:
    """Apply the stop requests that are new since the last call; None if there are none."""
    awaited = set() if now.plan.is_terminal else _awaited_nodes(now)
    new = [
        (node.member.incarnation, stop_request)
        for node in now.ledger.sightings.values()
        if node.alive
        and node.member.state is not State.LEFT
        and (stop_request := node.member.stop_request) is not None
        # Not from before the run was resumed, by a node that was disconnected meanwhile.
        and stop_request.life >= now.plan.life
        and not _is_of_a_second_agent(now, node, stop_request)
        and stop_request.serial > now.plan.acknowledged.get(node.member.incarnation, 0)
        and stop_request.leaver not in awaited  # it is asked to leave when it registers again
    ]
    if not new:
        return None
    known = {key: serial for key, serial in now.plan.acknowledged.items() if key in now.ledger.sightings}
    reason = "; ".join(dict.fromkeys(stop_request.words for _, stop_request in new))
    plan = now.plan.following(
        None if now.plan.is_terminal else reason,
        acknowledged={**known, **{key: stop_request.serial for key, stop_request in new}},
    )
    for key, stop_request in new:
        plan = _follow(now, plan, key, stop_request)
    return Decision.to_publish(plan)


def _is_of_a_second_agent(now: ClusterView, node: Sighting, stop_request: StopRequest) -> bool:
    """Return whether an agent with the node id of another asks to leave: that would remove the other's node."""
    holder = now.by_node.get(node.member.node_id)
    leaves = stop_request.leaver == node.member.node_id
    return leaves and holder is not None and holder.member.incarnation != node.member.incarnation


def _awaited_nodes(now: ClusterView) -> set[str]:
    """Return the nodes without a live incarnation that may register (again), as their last lease may still count.

    They have lost it, or were part of the world before and have yet to register in this new store.
    """
    sightings = now.ledger.sightings
    last = {seat.incarnation: seat.node_id for seat in now.plan.seats_at_risk} | {
        key: node.member.node_id for key, node in sightings.items()
    }
    return {
        node_id
        for key, node_id in last.items()
        if node_id not in now.by_node
        and key not in now.plan.refused
        and (key not in sightings or sightings[key].member.state is not State.LEFT)
        and now.now_s < now.ledger.fenced_s(key, now.policy) < FAR_S
    }


def _follow(now: ClusterView, plan: Plan, requester: str, stop_request: StopRequest) -> Plan:
    """Return ``plan``, which is to follow the present one, with what the request asks for."""
    if plan.is_terminal:
        return plan
    if stop_request.leaver is None:
        if plan.phase is Phase.FORMING:  # no workers run, or they are being stopped already
            notice = Notice(plan.version, stop_request.cause, 0.0, stop_request.words, ends=True)
            return stopped(now, plan, notice)
        return _give(now, plan, stop_request)
    leaver = now.by_node.get(stop_request.leaver)
    if leaver is None or leaver.member.incarnation in plan.leaving:
        return plan
    if _leaves_none(now, plan, leaver):
        words = f"{stop_request.words}; no other node can continue the run"[:LONGEST_TEXT]
        return _follow(now, plan, requester, msgspec.structs.replace(stop_request, leaver=None, words=words))
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
    staying = {
        node_id
        for node_id, node in now.by_node.items()
        if node is not leaver and node.member.incarnation not in plan.leaving
    }
    return not (staying | _awaited_nodes(now)) - {leaver.member.node_id}


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
    return msgspec.structs.replace(plan, notice=Notice(plan.version, cause, left_s, reason, ends))


def announce_growth(now: ClusterView, newcomers: list[Sighting]) -> Decision:
    """Have the workers save before the nodes that wait are let in."""
    plan = now.plan.following(
        f"{node_names(newcomers)} {'is' if len(newcomers) == 1 else 'are'} waiting to join"
    )
    notice = Notice(plan.version, Cause.GROW, now.policy.notice_s, plan.reason)
    return Decision.to_publish(msgspec.structs.replace(plan, notice=notice))


def decide_under_notice(
    now: ClusterView, busy: list[Seat], joining: tuple[str, ...], *, handles_notices: bool
) -> Decision:
    """Wait until the workers of ``busy`` seats have left too, at most until the deadline; then go on.

    Args:
        now: the cluster view; its plan has a notice.
        busy: the seats of its world whose workers have neither left nor succeeded.
        joining: nodes that wait to be let in.
        handles_notices: whether workers of the world are known to handle notices.
    """
    notice = now.plan.notice
    assert notice is not None  # the caller looked
    until_s = now.clock.notice_ends_s
    if notice.cause in PROMPT and not handles_notices:
        until_s = now.now_s
    if busy and now.now_s < until_s:
        waiting = f"{notice.words}; waiting for the workers of {node_names(busy)} to save and exit"
        return Decision(waiting, wake_s=until_s)
    if notice.ends:
        return Decision.to_publish(stopped(now, now.plan.following(), notice))
    return Decision.to_publish(now.plan.forming(notice.words, free=True, joining=joining))
