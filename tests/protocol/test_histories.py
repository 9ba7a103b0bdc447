"""Which of the things that machines remember of a lost store counts."""

from __future__ import annotations

import pytest

from elastic_agent.protocol.records import Lease, Phase, Plan, State
from tests.protocol.support import (
    CRASH,
    MARGIN_S,
    STEP_S,
    TTL_S,
    Table,
    member,
    on_disk,
    plan,
    policy,
    settled,
    world,
)

SEALED = on_disk(8, world(8, "a-1", "b-1", "c-1"), 1, ("a", "b", "c"))
FORMING = on_disk(8, world(7, "a-1", "b-1"), 1, ("a", "b"))
"""Of the same generation, by a node that never read that it was sealed."""


def awaited(table: Table) -> set[str]:
    return {seat.incarnation for seat in table.plan.uncleared}


@pytest.mark.parametrize(
    "other",
    [FORMING, on_disk(8, world(8, "a-1", "b-1"), 1), on_disk(8, world(8, "a-1", "b-1", "a-2"), 1)],
    ids=["not sealed", "smaller world", "world of the same size"],
)
def test_which_history_of_one_generation_counts_does_not_depend_on_who_reports_it(other: Plan) -> None:
    """Two worlds of it are those of two lives of the store, or one of them was never published."""
    for first, second in ((SEALED, other), (other, SEALED)):
        table = Table(remembered=first)
        table.comes("a", state=State.READY, generation=8, history=second)
        assert awaited(table) == {"a-1", "b-1", "c-1"}
        table = Table()
        for said in (member("a", generation=8, history=first), member("b", generation=8, history=second)):
            table.coordinator.observe(said, Lease(said.incarnation, TTL_S), 0.0)
        table.carry_out()
        assert awaited(table) == {"a-1", "b-1", "c-1"}


def test_a_history_ranks_by_generation_then_world_then_outcome() -> None:
    """A world ranks above an outcome of its generation: workers may run in it."""
    failed = on_disk(8, FORMING.world, outcome=Phase.FAILED)
    over = on_disk(8, SEALED.world, 1, ("a", "b", "c"), Phase.FINISHED)
    later = on_disk(9, SEALED.world)
    expected = [FORMING, failed, settled(failed), SEALED, over, settled(over), later]
    known = [later, settled(over), settled(failed), over, SEALED, failed, FORMING]
    assert sorted(known, key=lambda history: history.rank) == expected


def test_an_outcome_in_a_members_history_does_not_end_a_new_run() -> None:
    """Only the machine that hosts the store knows whether the verdict was settled and the name is free again."""
    over = on_disk(7, world(7, "a-1", "b-1"), 1, ("a", "b"), Phase.FINISHED)
    table = Table()
    table.comes("b", 2, history=over)
    table.wait(TTL_S + MARGIN_S)
    assert table.stand == (Phase.FORMING, 8)


def test_a_finished_run_is_not_restarted_by_a_higher_generation() -> None:
    table = Table(remembered=on_disk(7, world(7, "a-1"), 0, ("a",), Phase.FINISHED))
    table.comes("a", state=State.SUCCEEDED, generation=7)
    table.comes("b", history=SEALED)
    assert table.stand == (Phase.FINISHED, 7)
    table = Table(remembered=on_disk(7, world(7, "a-1"), 0, ("a",), Phase.FINISHED))
    table.comes("b", 2, history=SEALED)
    table.wait(TTL_S)
    assert table.stand == (Phase.FORMING, 9), "it had begun again before the store was lost"


def test_a_world_continues_only_if_all_its_nodes_run_it_and_not_another_of_its_generation() -> None:
    for other in (world(8, "b-1"), world(8, "a-1", "b-1", "c-1")):
        told = {"a": world(8, "a-1", "b-1"), "b": other}
        table = Table()
        for node, their in told.items():
            history = on_disk(8, their, 1)
            said = member(node, state=State.RUNNING, generation=8, history=history)
            table.coordinator.observe(said, Lease(said.incarnation, TTL_S), 0.0)
        table.carry_out()
        assert table.plan.phase is Phase.FORMING


# -- two runs of one name -----------------------------------------------------------------------


def test_a_settled_history_of_an_earlier_generation_forms_no_other_one() -> None:
    """No worker of it is left, whatever the record of the node that reports it contains."""
    table = Table()
    table.comes("a")
    table.comes("c")
    table.wait(2 * TTL_S)
    table.all_say(State.RUNNING, "a", "c")
    table.says("a", State.FAILED, failure=CRASH)
    assert table.stand == (Phase.FORMING, 2)
    told = settled(on_disk(1, world(1, "b-1"), outcome=Phase.FINISHED))
    table.comes("b", generation=0, state=State.RUNNING, history=told)
    assert table.stand == (Phase.FORMING, 2)
    table.all_say(State.READY, "a", "c", "b")
    assert (table.stand, table.world) == ((Phase.RUNNING, 2), ["a", "c", "b"])


def test_a_run_is_not_over_while_a_lost_node_may_still_train() -> None:
    """When its records are gone, the next run of this name may begin, and knows nothing of that node."""
    over = on_disk(11, world(11, "a-9"), 2, ("a",), Phase.FAILED)
    runs = on_disk(2, world(2, "b-1"), 0, ("b",))
    table = Table(policy(min_nodes=1), remembered=over)
    table.comes("a", 2)
    assert table.stand == (Phase.FAILED, 11)
    table.comes("b", state=State.RUNNING, generation=2, history=runs)
    table.says("a", State.LEFT)
    table.falls_silent("b")
    table.wait(TTL_S)
    assert (table.revoked, table.last.done) == (["b-1"], False)
    assert table.last.reason == "the run is over; waiting until no worker of b can be left"
    table.wait(MARGIN_S)
    assert table.last.done


def test_a_run_is_not_over_while_a_node_trains_in_a_later_generation() -> None:
    """A node that remembered nothing has finished a run of that name alone, in a store that had lost its data."""
    table = Table(policy(min_nodes=1))
    table.comes("c")
    table.wait(TTL_S)
    table.says("c", State.SUCCEEDED)
    assert table.stand == (Phase.FINISHED, 1)
    table.comes("a", state=State.RUNNING, generation=8, history=on_disk(8, world(8, "a-1"), 0, ("a",)))
    assert (table.stand, awaited(table)) == ((Phase.FORMING, 9), {"a-1", "c-1"})


def test_a_world_of_the_generation_that_a_new_store_forms_is_cleared() -> None:
    """The machine of the store has lost its disk, and begins with generation 1, which others run."""
    table = Table(policy(min_nodes=2))
    table.comes("a")
    assert table.stand == (Phase.FORMING, 1)
    table.comes("b", state=State.RUNNING, generation=1, history=on_disk(1, world(1, "b-1", "c-1"), 0, ("b",)))
    assert (table.stand, awaited(table)) == ((Phase.FORMING, 2), {"b-1", "c-1"})


def test_nodes_with_an_older_history_that_do_not_run_are_not_waited_for() -> None:
    table = Table(policy(min_nodes=1), remembered=on_disk(11, None, 0, ("a",), Phase.FINISHED, settled=True))
    table.comes("b", 2, history=on_disk(2, world(2, "a-1", "b-1"), 0, ("a", "b")))
    assert (table.stand, awaited(table)) == ((Phase.FORMING, 12), set())


# -- a store that others may have used before it lost its data -----------------------------------


def test_the_first_coordinator_of_a_new_store_may_have_an_outdated_history() -> None:
    """It has run alone before, and was out when the others formed the generation after that."""
    table = Table(policy(min_nodes=1), remembered=on_disk(2, world(2, "c-1"), 0, ("c",)), store_born_s=0.0)
    table.comes("c", 2, replaces=("c-1",))
    table.wait(TTL_S)
    assert table.plans == []
    table.comes("a", state=State.RUNNING, generation=3, history=on_disk(3, world(3, "a-1"), 0, ("c", "a")))
    found = table.plans[0]
    assert (found.phase, found.generation) == (Phase.RUNNING, 3), "c joins the world that runs"


def test_an_outcome_is_valid_at_once_in_a_new_store() -> None:
    over = on_disk(2, world(2, "c-1"), 0, ("c",), Phase.FINISHED)
    table = Table(policy(min_nodes=1), remembered=over, store_born_s=0.0)
    table.comes("c", 2)
    assert table.stand == (Phase.FINISHED, 2)


def ended(outcome: Phase) -> Plan:
    """A run of this name whose end every node has acknowledged."""
    return on_disk(11, world(11, "b-1", "c-1"), 2, ("b", "c"), outcome, settled=True)


@pytest.mark.parametrize(("outcome", "charged"), [(Phase.FINISHED, 0), (Phase.FAILED, 0), (Phase.STOPPED, 2)])
def test_a_new_run_starts_above_a_finished_one_without_its_restarts_and_world(
    outcome: Phase, charged: int
) -> None:
    """One that was stopped, which a node reports late, is resumed with its used restarts."""
    table = Table(policy(min_nodes=2))
    table.comes("a")
    table.comes("b", 2, history=ended(outcome))
    assert (table.stand, table.plan.charged, awaited(table)) == ((Phase.FORMING, 12), charged, set())
    table.all_say(State.READY, "a", "b")
    table.wait(table.rules.settle_s)
    assert (table.stand, table.world) == ((Phase.RUNNING, 12), ["a", "b"]), "no other node is waited for"


def test_a_running_world_is_kept_when_a_higher_one_of_a_finished_run_is_reported() -> None:
    table = Table(policy(min_nodes=1, max_nodes=1))
    table.comes("a")
    table.wait(table.rules.settle_s)
    table.says("a", State.RUNNING)
    table.comes("b", 2, history=ended(Phase.FINISHED))
    table.wait(TTL_S + MARGIN_S)
    assert table.stand == (Phase.RUNNING, 1)


# -- what the run's nodes hold leases by -------------------------------------------------------

LONG_S = 2 * TTL_S
BROAD_S = 3 * MARGIN_S
LONGER = policy(min_nodes=1, lease_ttl_s=LONG_S, fence_margin_s=BROAD_S)
RAN = plan(Phase.RUNNING, 8, 20, policy=LONGER, world=world(8, "a-1", "b-1"))


def test_unregistered_nodes_get_the_lease_and_the_margin_of_the_earlier_policy() -> None:
    """Not those of the node that is back first, which may ask for less than the run had."""
    table = Table(policy(min_nodes=1), remembered=RAN)
    table.comes("b", state=State.RUNNING, generation=8, history=RAN, stop_s=10 * TTL_S)
    table.wait(LONG_S)
    assert table.stand == (Phase.FORMING, 9)
    table.says("b", State.READY)
    table.wait(BROAD_S - STEP_S)
    assert table.stand == (Phase.FORMING, 9), "a's workers may still run"
    table.wait(STEP_S)
    assert table.stand == (Phase.RUNNING, 9)


def test_a_nodes_lease_is_accepted_although_another_node_registered_first() -> None:
    for remembered in (RAN, None):
        table = Table(policy(min_nodes=1), remembered=remembered)
        table.comes("c", 1)
        table.comes("a", ttl_s=LONG_S, state=State.RUNNING, generation=8, history=RAN)
        table.wait(LONG_S)
        assert table.plan.refused == {}
        assert (table.plan.policy.lease_ttl_s, table.plan.policy.fence_margin_s) == (LONG_S, BROAD_S)


def test_the_lease_of_an_earlier_run_of_that_name_does_not_count() -> None:
    over = settled(plan(Phase.FINISHED, 8, 20, policy=LONGER, world=world(8, "a-1")))
    table = Table(remembered=over)
    table.comes("a")
    assert table.plan.policy.lease_ttl_s == TTL_S


# -- what the first plan says -------------------------------------------------------------------


def first_reason(remembered: Plan, **fields: object) -> str:
    table = Table(policy(min_nodes=1), remembered=remembered)
    table.comes("a", 2, **fields)
    table.wait(TTL_S + MARGIN_S)
    return table.plans[0].reason


ALONE, TOGETHER = world(7, "a-1"), world(7, "a-1", "b-1")
INTERRUPTED = "resuming the run after generation 7, which was interrupted"


@pytest.mark.parametrize(
    ("remembered", "reason"),
    [
        (
            on_disk(7, ALONE, 0, ("a",)),
            INTERRUPTED,
        ),  # the store was lost as well, but the user did not do that
        (on_disk(8, ALONE, 0, ("a",)), INTERRUPTED),
        (on_disk(2), "the run starts"),
        (on_disk(7, TOGETHER, 0, ("a", "b")), "the store was lost, and a joined anew"),  # b may still run
        *(
            (
                on_disk(7, ALONE, 0, ("a",), outcome, settled=True),
                f"a run with this id {outcome} before, in generation 7; a new one starts",
            )
            for outcome in (Phase.FINISHED, Phase.FAILED)
        ),
    ],
)
def test_the_first_plan_says_what_became_of_the_run_before(remembered: Plan, reason: str) -> None:
    assert first_reason(remembered, replaces=("a-1",)) == reason
    if reason == INTERRUPTED:
        assert first_reason(remembered) == reason


@pytest.mark.parametrize("comes_back", [False, True], ids=["stays away", "comes back"])
def test_a_node_that_was_lost_together_with_the_store_counts_as_lost(comes_back: bool) -> None:
    table = Table(policy(min_nodes=2))
    table.comes("b", state=State.FAILED, generation=8, failure=CRASH, history=SEALED)
    table.comes("c", state=State.RUNNING, generation=8, history=SEALED)
    assert table.stand == (Phase.FORMING, 9)
    if comes_back:
        table.comes("a", 2, replaces=("a-1",))
    table.all_say(State.READY, "b", "c")
    table.wait(TTL_S + MARGIN_S)
    assert (table.stand, table.world) == ((Phase.RUNNING, 9), ["a", "b", "c"] if comes_back else ["b", "c"])
    assert table.plan.losses == ({} if comes_back else {"a": 1})
