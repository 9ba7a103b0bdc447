"""When a generation is sealed, and with whom."""

from __future__ import annotations

from msgspec.structs import replace

from elastic_agent.protocol.records import FailureKind, Phase, State

from .stage import POLICY, Stage, member, running


def test_max_nodes_ready_are_sealed_at_once() -> None:
    stage = Stage().arrives("a", "b", "c")
    assert stage.plan.phase is Phase.RUNNING
    assert stage.seated == ["a", "b", "c"]


def test_fewer_than_max_wait_for_settle_after_the_last_arrival() -> None:
    stage = Stage().arrives("a", "b").wait(0.5)
    assert stage.plan.phase is Phase.FORMING
    assert stage.wait(0.5).plan.phase is Phase.RUNNING


def test_an_arrival_extends_the_wait() -> None:
    stage = Stage(replace(POLICY, max_nodes=9)).arrives("a", "b").wait(0.5).arrives("c").wait(0.5)
    assert stage.plan.phase is Phase.FORMING
    assert stage.wait(0.5).plan.phase is Phase.RUNNING
    assert len(stage.seated) == 3


def test_arrivals_extend_it_to_three_times_settle_at_most() -> None:
    stage = Stage(replace(POLICY, max_nodes=99)).arrives("a", "b")
    for number in range(6):
        stage.wait(0.5)
        if stage.plan.phase is Phase.FORMING:
            stage.arrives(f"n{number}")
    assert stage.now_s == 3.0
    assert stage.plan.phase is Phase.RUNNING


def test_a_node_known_already_does_not_extend_it() -> None:
    stage = Stage(replace(POLICY, max_nodes=9)).arrives("a", "b", "c").wait(0.5)
    stage.dies("c").arrives("c.2", replaces=("c",)).wait(0.5)
    assert stage.plan.phase is Phase.RUNNING
    assert "c.2" in stage.seated


def test_below_min_the_run_fails_after_the_join_timeout_and_says_who_came() -> None:
    stage = Stage().arrives("a").wait(99.5)
    assert stage.plan.phase is Phase.FORMING
    stage.wait(1.0)
    assert stage.plan.phase is Phase.FAILED
    assert "only 1 of at least 2 nodes" in stage.plan.reason
    assert "a (1 worker)" in stage.plan.reason
    assert stage.plan.failure is not None
    assert stage.plan.failure.kind is FailureKind.TOO_FEW


def test_a_node_that_died_while_waiting_is_not_counted() -> None:
    stage = Stage().arrives("a", "b").dies("b").wait(0.5)
    stage.policy = replace(POLICY)
    stage = Stage().arrives("a").wait(1.0).arrives("b").dies("b")
    stage.leases["b"] = stage.leases["b"].condemn()
    stage.coordinator.condemned("b")
    assert stage.wait(2.0).plan.phase is Phase.FORMING


def test_survivors_of_a_failure_need_no_timer() -> None:
    stage = running("a", "b").fails("a")
    assert stage.plan.phase is Phase.FORMING
    assert stage.all_ready().plan.phase is Phase.RUNNING
    assert stage.plan.generation == 2


def test_nothing_is_sealed_before_every_member_of_the_previous_world_is_cleared() -> None:
    stage = running("a", "b", "c").fails("a").all_ready("a", "b").wait(0.5)
    assert stage.plan.phase is Phase.FORMING, "c has not said that it stopped"
    assert stage.all_ready("c").plan.phase is Phase.RUNNING


def test_a_lost_node_is_cleared_by_the_end_of_its_lease_and_the_margin() -> None:
    stage = running("a", "b", "c").dies("c")
    stage.wait(6.0)
    assert stage.plan.phase is Phase.FORMING
    stage.all_ready("a", "b").wait(0.5)
    assert stage.plan.phase is Phase.FORMING, "the margin is not over"
    stage.wait(0.5)
    assert stage.seated == ["a", "b"]


def test_a_successor_with_proof_clears_its_predecessor_at_once() -> None:
    stage = running("a", "b", "c").dies("c").arrives("c.2", replaces=("c",))
    assert stage.plan.phase is Phase.FORMING
    assert stage.all_ready("a", "b", "c.2").seated == ["a", "b", "c.2"]


def test_a_successor_without_proof_waits_for_its_predecessors_lease() -> None:
    stage = running("a", "b", "c").dies("c").arrives("c.2").wait(5.5)
    assert stage.plan.phase is Phase.RUNNING
    stage.wait(0.5).all_ready("a", "b", "c.2")
    assert stage.plan.phase is Phase.FORMING
    assert stage.wait(1.0).all_ready().seated == ["a", "b", "c.2"]


def test_a_node_that_does_not_stop_is_condemned_in_the_end() -> None:
    stage = running("a", "b", "c").fails("a").all_ready("a", "b").wait(20.0)
    assert stage.leases["c"].condemned
    assert stage.seated == ["a", "b"]


def test_more_nodes_than_max_stand_by_and_fill_the_next_vacancy() -> None:
    stage = Stage().arrives("a", "b", "c", "d")
    assert stage.seated == ["a", "b", "c"]
    stage.all_run().says("b", State.LEFT, 1)
    assert stage.plan.phase is Phase.FORMING
    assert stage.all_ready("a", "c", "d").seated == ["a", "c", "d"]


def test_members_of_the_previous_world_come_before_standbys() -> None:
    stage = Stage().arrives("b", "c", "d", "a")
    assert stage.seated == ["b", "c", "d"]
    stage.all_run().fails("d").all_ready()
    assert stage.seated == ["b", "c", "d"]


def test_a_returning_node_gets_its_old_ranks() -> None:
    stage = running("a", "b", "c").dies("b").wait(7.0).all_ready()
    assert stage.seated == ["a", "c"]
    stage.all_run().arrives("b.2").wait(1.0).all_ready()
    assert stage.seated == ["a", "b.2", "c"]


def test_new_nodes_are_seated_in_natural_order_of_their_names() -> None:
    stage = Stage(replace(POLICY, max_nodes=4)).arrives("n10", "n9", "n1", "n2")
    assert stage.seated == ["n1", "n2", "n9", "n10"]


def test_slots_may_differ_and_ranks_are_their_prefix_sums() -> None:
    stage = Stage()
    for name, slots in (("a", 3), ("b", 1), ("c", 2)):
        stage.members[name] = member(name, slots=slots)
    stage.arrives("a", "b", "c")
    assert stage.plan.world is not None
    assert [seat.first_rank for seat in stage.plan.world.seats] == [0, 3, 4]
    assert stage.plan.world.world_size == 6


def test_a_node_whose_bootstrap_store_was_unreachable_does_not_host_the_next() -> None:
    stage = running("a", "b")
    assert stage.plan.world is not None
    assert stage.plan.world.bootstrap_node == "a"
    stage.fails("a").all_ready()
    stage.fails("b", FailureKind.BOOTSTRAP, blames="a").all_ready()
    assert stage.plan.world is not None
    assert stage.plan.world.bootstrap_node == "b"
    assert stage.plan.charged == 1, "only the worker's failure was charged"
