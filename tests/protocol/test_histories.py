"""Which of the things that machines remember of a lost store counts."""

from __future__ import annotations

from elastic_agent.protocol.records import History, Phase, State
from tests.protocol.support import MARGIN_S, TTL_S, Table, world

SEALED = History(8, world(8, "a-1", "b-1", "c-1"), 1, ("a", "b", "c"))
FORMING = History(8, world(7, "a-1", "b-1"), 1, ("a", "b"))
"""Of the same generation, by somebody who never read that it was sealed."""


def awaited(table: Table) -> set[str]:
    return {seat.incarnation for seat in table.plan.awaiting}


def test_of_one_generation_the_history_that_knows_its_world_counts() -> None:
    for remembered, told in ((SEALED, FORMING), (FORMING, SEALED)):
        table = Table(remembered=remembered)
        table.comes("a", state=State.READY, generation=8, history=told)
        assert awaited(table) == {"a-1", "b-1", "c-1"}


def test_a_history_ranks_by_generation_then_world_then_verdict() -> None:
    over = History(8, SEALED.world, 1, ("a", "b", "c"), Phase.FINISHED)
    settled = History(8, SEALED.world, 1, ("a", "b", "c"), Phase.FINISHED, settled=True)
    later = History(9, SEALED.world)
    assert sorted([later, settled, over, FORMING, SEALED], key=lambda one: one.rank) == [
        FORMING,
        SEALED,
        over,
        settled,
        later,
    ]


def test_a_verdict_that_only_a_member_tells_does_not_end_a_new_run() -> None:
    """Only the machine that hosts the store knows whether the verdict was settled and the name is free again."""
    over = History(7, world(7, "a-1", "b-1"), 1, ("a", "b"), Phase.FINISHED)
    table = Table()
    table.comes("b", 2, history=over)
    table.wait(TTL_S + MARGIN_S)
    assert table.stand == (Phase.FORMING, 8)


def test_a_run_that_is_over_does_not_begin_again_for_a_higher_generation() -> None:
    table = Table(remembered=History(7, world(7, "a-1"), 0, ("a",), Phase.FINISHED))
    table.comes("a", state=State.SUCCEEDED, generation=7)
    table.comes("b", history=SEALED)
    assert table.stand == (Phase.FINISHED, 7)
