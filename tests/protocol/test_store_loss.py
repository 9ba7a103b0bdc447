"""A new, empty store and agents with a history: adopt what runs, else go above it, and never repeat."""

from __future__ import annotations

from elastic_agent.protocol.records import History, Phase, State

from .stage import Stage, world

KNOWN = History(7, world(7, "a", "b"), charged=1, order=("a", "b"))


def test_a_run_without_a_history_begins_at_generation_one() -> None:
    assert Stage().arrives("a").plan.generation == 1


def test_a_world_whose_members_all_still_run_is_adopted_untouched() -> None:
    stage = Stage(remembered=KNOWN).says("a", State.RUNNING, 7).says("b", State.RUNNING, 7)
    assert (stage.plan.phase, stage.plan.generation, stage.plan.charged) == (Phase.RUNNING, 7, 1)
    assert stage.plan.world == KNOWN.world


def test_it_is_adopted_from_what_a_member_tells_as_well() -> None:
    stage = Stage().says("a", State.RUNNING, 7, history=KNOWN).says("b", State.RUNNING, 7)
    assert (stage.plan.phase, stage.plan.generation) == (Phase.RUNNING, 7)


def test_the_members_of_the_known_world_are_awaited_for_a_lease() -> None:
    stage = Stage(remembered=KNOWN).says("a", State.RUNNING, 7).wait(5.5)
    assert not stage.plans
    assert stage.wait(0.5).plan.phase is Phase.FORMING


def test_who_was_not_heard_is_cleared_only_by_lease_and_margin_after_the_stores_birth() -> None:
    stage = Stage(remembered=KNOWN).says("a", State.RUNNING, 7).wait(6.0)
    stage.arrives("c").all_ready("a", "c").wait(0.5)
    assert stage.plan.phase is Phase.FORMING
    assert stage.wait(0.5).plan.generation == 8
    assert stage.plan.phase is Phase.RUNNING


def test_a_member_that_came_back_anew_re_forms_the_world() -> None:
    stage = Stage(remembered=KNOWN).says("a.2", State.READY, 0, replaces=("a",))
    assert (stage.plan.phase, stage.plan.generation) == (Phase.FORMING, 8)
    assert stage.says("b", State.RUNNING, 7).all_ready("a.2").plan.phase is Phase.FORMING
    assert stage.all_ready("b").seated == ["a.2", "b"]


def test_nothing_is_adopted_when_the_next_generation_had_begun_to_form() -> None:
    forming = History(8, KNOWN.world, 1, ("a", "b"))
    stage = Stage(remembered=forming).says("a", State.RUNNING, 7).says("b", State.RUNNING, 7)
    assert (stage.plan.phase, stage.plan.generation) == (Phase.FORMING, 9)


def test_of_two_histories_of_a_generation_the_one_that_knows_its_world_counts() -> None:
    sealed = History(8, world(8, "a", "b", "c"), 1, ("a", "b", "c"))
    forming = History(8, KNOWN.world, 1, ("a", "b"))
    stage = Stage(remembered=sealed).says("a", State.READY, 8, history=forming)
    assert {seat.incarnation for seat in stage.plan.awaiting} == {"a", "b", "c"}


def test_a_higher_generation_heard_of_later_moves_the_next_one_above_it() -> None:
    stage = Stage().arrives("c", "d").wait(3.0).all_run()
    assert stage.plan.generation == 1
    stage.says("a", State.RUNNING, 7, history=KNOWN)
    assert (stage.plan.phase, stage.plan.generation) == (Phase.FORMING, 8)
    assert {seat.incarnation for seat in stage.plan.awaiting} == {"a", "b", "c", "d"}


def test_a_verdict_outlives_its_store() -> None:
    over = History(7, KNOWN.world, 1, ("a", "b"), Phase.FINISHED)
    stage = Stage(remembered=over).says("b", State.SUCCEEDED, 7)
    assert (stage.plan.phase, stage.plan.generation) == (Phase.FINISHED, 7)


def test_a_run_that_everybody_knew_to_be_over_begins_anew_above_its_generations_at_once() -> None:
    over = History(7, KNOWN.world, 1, ("a", "b"), Phase.FAILED, settled=True)
    stage = Stage(remembered=over).arrives("b.2", "a.2", "c")
    assert (stage.plan.phase, stage.plan.generation, stage.plan.charged) == (Phase.RUNNING, 8, 0)
    assert stage.seated == ["a.2", "b.2", "c"]


def test_what_a_member_tells_of_a_verdict_does_not_end_a_new_run() -> None:
    over = History(7, KNOWN.world, 1, ("a", "b"), Phase.FINISHED)
    stage = Stage().says("b.2", State.READY, 0, history=over).wait(6.0)
    assert stage.plan.phase is Phase.FORMING
