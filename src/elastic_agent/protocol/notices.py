"""Coordinator's rules of being stopped in good order: who asked for it, what workers are told, when it is done. Pure.

A notice is for everybody, whoever asked: a rank that leaves alone leaves the others in a collective that never ends. So
all workers of the world are told, save at one step, and leave; then the run ends, or goes on without the nodes that
were to leave, or with the ones that waited. What has not left at the deadline is stopped.
"""

from __future__ import annotations

import msgspec

from .cluster_view import Decision, Situation, names, stopped
from .forming import forming_plan
from .leases import Sighting
from .records import Ask, Cause, Notice, Phase, Plan, Seat, State, World

PROMPT = frozenset({Cause.DRAIN, Cause.GROW, Cause.OPERATOR})
"""Causes for which workers that do not look at notices are stopped at once. The others leave them their time."""


def hear(now: Situation) -> Decision | None:
    """Follow what nodes asked for since the last look; None if there is nothing new."""
    asks = [
        (one.member.incarnation, one.member.ask)
        for one in now.ledger.sightings.values()
        if one.alive and one.member.state is not State.LEFT and one.member.ask is not None
        if _is_of_this_life(now, one.member.ask)
    ]
    new = [(key, ask) for key, ask in asks if ask.serial > now.plan.heard.get(key, 0)]
    if not new:
        return None
    heard = {key: serial for key, serial in now.plan.heard.items() if key in now.ledger.sightings}
    plan = msgspec.structs.replace(now.plan, heard={**heard, **{key: ask.serial for key, ask in new}})
    for _, ask in new:
        plan = _follow(now, plan, ask)
    reason = "; ".join(dict.fromkeys(ask.words for _, ask in new))
    reason = plan.reason if plan.is_terminal else reason
    return Decision(reason, msgspec.structs.replace(plan, version=now.plan.version + 1, reason=reason[:512]))


def _is_of_this_life(now: Situation, ask: Ask) -> bool:
    """Whether it was not asked for before the run was taken up again, by a node that was cut off meanwhile."""
    return ask.life >= now.plan.life


def _follow(now: Situation, plan: Plan, ask: Ask) -> Plan:
    if plan.is_terminal:
        return plan
    if ask.leaver is None:
        if plan.phase is Phase.FORMING:  # nobody runs, or what runs is being stopped already
            return stopped(now, plan, Notice(now.plan.version + 1, ask.cause, 0.0, ask.words, ends=True))
        return _tell(now, plan, ask)
    leaver = now.by_node.get(ask.leaver)
    if leaver is None or leaver.member.incarnation in plan.leaving:
        return plan
    plan = msgspec.structs.replace(plan, leaving=(*plan.leaving, leaver.member.incarnation))
    return _tell(now, plan, ask) if _runs(now, leaver) else plan


def _runs(now: Situation, one: Sighting) -> bool:
    world = now.plan.world
    return (
        now.plan.phase is Phase.RUNNING
        and world is not None
        and world.seat_of(one.member.incarnation) is not None
    )


def _tell(now: Situation, plan: Plan, ask: Ask) -> Plan:
    """Give the workers a notice; one that they have already becomes no milder and ends no later by it."""
    known, ends, left_s = plan.notice, ask.leaver is None, ask.left_s
    cause, words = ask.cause, ask.words
    if known is not None:
        left_s = min(left_s, now.notice_left_s)
        if known.ends and not ends:
            cause, words, ends = known.cause, known.words, True
    notice = Notice(now.plan.version + 1, cause, left_s, words, ends)
    return msgspec.structs.replace(plan, notice=notice)


def announce_growth(now: Situation, newcomers: list[str]) -> Decision:
    """Have the workers save before the nodes that wait are let in."""
    words = f"{names(newcomers)} {'is' if len(newcomers) == 1 else 'are'} waiting to join"[:512]
    notice = Notice(now.plan.version + 1, Cause.GROW, now.policy.notice_s, words)
    plan = msgspec.structs.replace(now.plan, version=now.plan.version + 1, reason=words, notice=notice)
    return Decision(words, plan)


def anybody_heeds(now: Situation, world: World) -> bool:
    """Whether workers of this world are known to look at notices."""
    known = (now.sighting(seat) for seat in world.seats)
    return any(one is not None and one.member.heeds for one in known)


def has_yielded(now: Situation, seat: Seat) -> bool:
    """Whether the workers of this seat saved and left."""
    known = now.sighting(seat)
    return (
        known is not None
        and known.member.state is State.YIELDED
        and known.member.generation == now.plan.generation
    )


def decide_under_notice(now: Situation, world: World, busy: list[Seat], joining: tuple[str, ...]) -> Decision:
    """Wait until the workers of ``busy`` seats have left too, at most until the deadline; then go on.

    Args:
        now: the situation; its plan has a notice.
        world: the world that runs.
        busy: its seats whose workers have neither left nor succeeded.
        joining: nodes that wait to be let in.
    """
    notice = now.plan.notice
    assert notice is not None  # the caller looked
    until_s = now.clock.notice_ends_s
    if notice.cause in PROMPT and not anybody_heeds(now, world):
        until_s = now.now_s
    if busy and now.now_s < until_s:
        who = names(seat.node_id for seat in busy)
        return Decision(f"{notice.words}; waiting for the workers of {who} to save", wake_s=until_s)
    return after_notice(now, notice, joining)


def after_notice(now: Situation, notice: Notice, joining: tuple[str, ...] = ()) -> Decision:
    """The notice is over: everybody left, or the deadline has come."""
    if notice.ends:
        return Decision(notice.words, stopped(now, now.plan, notice))
    plan = forming_plan(now.plan, notice.words, free=True, notice=None, joining=joining)
    return Decision(notice.words, plan)
