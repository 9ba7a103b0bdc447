"""The assignment of ranks: neighbours stay neighbours, and no node moves without need."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_agent.protocol.forming import natural_key, remember, seat_members, seating_order
from elastic_agent.protocol.records import Member
from tests.protocol.support import member

light = settings(max_examples=60)

nodes = st.lists(st.integers(0, 30).map(lambda number: f"n{number}"), min_size=1, max_size=8, unique=True)
names = st.text("abzAZ0129._:@+-", min_size=1, max_size=20)


def ids(members: list[Member]) -> list[str]:
    return [member.node_id for member in members]


@light
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_ranks_are_the_running_sums_of_the_slots(slots: list[int]) -> None:
    seats = seat_members([member(f"n{index}", slots=count) for index, count in enumerate(slots)])
    ranks = [rank for seat in seats for rank in range(seat.first_rank, seat.first_rank + seat.slots)]
    assert ranks == list(range(sum(slots)))
    assert [seat.slots for seat in seats] == slots


def test_n2_comes_before_n10_and_racks_stay_together() -> None:
    came = [member(name) for name in ("rack2-n1", "rack1-n10", "rack1-n2", "rack10-n1")]
    assert ids(seating_order(came, ())) == ["rack1-n2", "rack1-n10", "rack2-n1", "rack10-n1"]


@light
@given(nodes, st.data())
def test_known_nodes_keep_their_order_for_any_missing_and_new_ones(
    order: list[str], data: st.DataObject
) -> None:
    stayers = data.draw(st.lists(st.sampled_from(order), unique=True))
    new = data.draw(st.lists(st.integers(100, 120).map(lambda number: f"n{number}"), unique=True))
    came = data.draw(st.permutations([member(node) for node in stayers + new]))
    seated = ids(seating_order(came, order))
    assert seated[: len(stayers)] == [node for node in order if node in stayers]
    assert seated[len(stayers) :] == sorted(new, key=natural_key)


@light
@given(nodes, st.data())
def test_a_returning_node_gets_its_position_between_the_others_back(
    came: list[str], data: st.DataObject
) -> None:
    first = seating_order([member(node) for node in came], ())
    order = remember((), seat_members(first))
    away = data.draw(st.sampled_from(came))
    meanwhile = seating_order([member(node) for node in [*came, "stand-in"] if node != away], order)
    order = remember(order, seat_members(meanwhile))
    again = seating_order([member(node) for node in reversed(came)], order)
    assert ids(again) == ids(first)


@light
@given(nodes, st.data())
def test_a_preferred_rank_orders_new_nodes_only(order: list[str], data: st.DataObject) -> None:
    wishes = data.draw(st.lists(st.integers(0, 50), min_size=len(order), max_size=len(order)))
    seated = [member(node, preferred_rank=wish) for node, wish in zip(order, wishes, strict=True)]
    new = [member("z", preferred_rank=0), member("y", preferred_rank=1), member("x")]
    came = data.draw(st.permutations(seated + new))
    assert ids(seating_order(came, order)) == [*order, "z", "y", "x"]
