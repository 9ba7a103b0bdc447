"""The assignment of ranks. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .records import Member, Seat

_DIGITS = re.compile(r"(\d+)")

MAX_REMEMBERED_NODES = 4096
"""How many nodes that once had a seat keep their position in the order."""


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
