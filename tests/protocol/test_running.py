"""What ends a generation, who may come in, what is charged, and how a run ends."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from elastic_agent.protocol.records import FailureKind, Phase, State

from .stage import POLICY, Stage, running


@pytest.mark.parametrize("kind", [FailureKind.WORKER, FailureKind.HANG])
def test_a_failure_re_forms_the_world_and_is_charged_when_that_is_sealed(kind: FailureKind) -> None:
    stage = running("a", "b").fails("a", kind)
    assert (stage.plan.phase, stage.plan.generation, stage.plan.charged) == (Phase.FORMING, 2, 0)
    stage.all_ready()
    assert (stage.plan.phase, stage.plan.charged) == (Phase.RUNNING, 1)


def test_two_failures_in_one_generation_are_charged_once() -> None:
    stage = running("a", "b").fails("a").fails("b").all_ready()
    assert stage.plan.charged == 1


def test_the_budget_is_exact() -> None:
    stage = running("a", "b")
    for charged in range(1, POLICY.max_restarts + 1):
        stage.fails("a").all_ready().all_run()
        assert (stage.plan.phase, stage.plan.charged) == (Phase.RUNNING, charged)
    stage.fails("a", summary="exit code 7").all_ready()
    assert stage.plan.phase is Phase.FAILED
    assert stage.plan.reason == "a: exit code 7; all 2 restarts are used"


def test_without_a_budget_the_first_failure_is_the_last() -> None:
    stage = running("a", "b", policy=replace(POLICY, max_restarts=0)).fails("a").all_ready()
    assert stage.plan.phase is Phase.FAILED
    assert "no restarts are allowed" in stage.plan.reason


def test_a_failure_is_not_charged_when_a_participant_was_lost() -> None:
    """The others' collectives fail because a peer vanished; the peer's lease ends only later."""
    stage = running("a", "b", "c").dies("c").fails("a").fails("b").all_ready("a", "b").wait(8.0)
    assert (stage.plan.phase, stage.plan.charged) == (Phase.RUNNING, 0)
    assert stage.plan.reason.endswith("restart not charged")


def test_a_failure_is_not_charged_when_a_participant_leaves() -> None:
    stage = running("a", "b", "c").fails("a").says("c", State.LEAVING, 1).says("c", State.LEFT, 1)
    assert stage.all_ready("a", "b").plan.charged == 0


def test_a_failure_is_not_charged_when_a_participant_came_back_anew() -> None:
    stage = running("a", "b", "c").fails("a").dies("c").arrives("c.2", replaces=("c",)).all_ready()
    assert (stage.plan.phase, stage.plan.charged) == (Phase.RUNNING, 0)


def test_membership_changes_are_free() -> None:
    stage = running("a", "b").arrives("c").wait(1.5).all_ready().all_run()
    stage.says("c", State.LEAVING, 2).says("c", State.LEFT, 2).all_ready("a", "b").all_run()
    stage.dies("b").wait(7.5)
    assert (stage.plan.phase, stage.plan.generation, stage.plan.charged) == (Phase.FORMING, 4, 0)


def test_a_newcomer_waits_for_settle_and_is_then_let_in() -> None:
    stage = running("a", "b").arrives("c").wait(0.5)
    assert stage.plan.phase is Phase.RUNNING
    stage.wait(0.5)
    assert (stage.plan.phase, stage.plan.reason) == (Phase.FORMING, "c joined")
    assert stage.all_ready().seated == ["a", "b", "c"]


def test_newcomers_are_let_in_together() -> None:
    stage = (
        running("a", "b", policy=replace(POLICY, max_nodes=9)).arrives("c").wait(0.5).arrives("d").wait(0.5)
    )
    assert stage.plan.phase is Phase.RUNNING, "d has not settled"
    assert stage.wait(0.5).plan.reason == "c, d join"


def test_a_full_world_lets_nobody_in() -> None:
    stage = running("a", "b", "c").arrives("d").wait(30.0)
    assert stage.plan.phase is Phase.RUNNING


def test_a_node_that_is_lost_again_and_again_is_kept_waiting_longer_and_longer() -> None:
    stage = running("a", "b")
    waits: list[float] = []
    for life in range(1, 5):
        name = f"c.{life}"
        stage.arrives(name)
        arrived_s = stage.now_s
        while stage.plan.phase is Phase.RUNNING:
            stage.wait(0.5)
        waits.append(stage.now_s - arrived_s)
        stage.all_ready().all_run().dies(name).wait(7.5).all_ready("a", "b").all_run()
    assert waits == [1.0, 1.0, 4.0, 8.0]


def test_a_node_that_fails_twice_before_user_code_runs_is_left_out_uncharged() -> None:
    stage = running("a", "b", "c")
    stage.fails("c", FailureKind.START).all_ready()
    assert stage.seated == ["a", "b", "c"]
    for name in ("a", "b"):
        stage.says(name, State.RUNNING, stage.plan.generation)
    stage.fails("c", FailureKind.START).all_ready()
    assert stage.seated == ["a", "b"]
    assert stage.plan.charged == 0


def test_a_node_that_cannot_start_and_cannot_be_spared_spends_the_budget() -> None:
    stage = running("a", "b")
    for _ in range(4):
        if stage.plan.phase is Phase.RUNNING:
            stage.says("a", State.RUNNING, stage.plan.generation).fails("b", FailureKind.START).all_ready()
    assert stage.plan.phase is Phase.FAILED
    assert stage.plan.charged == POLICY.max_restarts


def test_a_node_that_does_not_start_in_time_is_given_up() -> None:
    stage = Stage().arrives("a", "b", "c")
    for name in ("a", "b"):
        stage.says(name, State.RUNNING, 1)
    stage.wait(30.0)
    assert stage.leases["c"].condemned
    assert stage.plan.phase is Phase.FORMING


def test_the_run_is_finished_when_every_participant_succeeded() -> None:
    stage = running("a", "b").says("a", State.SUCCEEDED, 1)
    assert stage.plan.phase is Phase.RUNNING
    assert stage.says("b", State.SUCCEEDED, 1).plan.phase is Phase.FINISHED


def test_losing_a_node_that_succeeded_is_no_loss() -> None:
    stage = running("a", "b").says("a", State.SUCCEEDED, 1).dies("a").wait(20.0)
    assert stage.plan.phase is Phase.RUNNING
    assert stage.plan.succeeded == ("a",)
    assert stage.says("b", State.SUCCEEDED, 1).plan.phase is Phase.FINISHED


def test_a_failure_before_all_succeeded_re_forms() -> None:
    stage = running("a", "b").says("a", State.SUCCEEDED, 1).fails("b")
    assert stage.plan.phase is Phase.FORMING


def test_a_failure_after_all_succeeded_is_ignored() -> None:
    stage = running("a", "b").says("a", State.SUCCEEDED, 1).says("b", State.SUCCEEDED, 1).fails("b")
    assert stage.plan.phase is Phase.FINISHED


def test_the_verdict_is_kept_until_everybody_alive_has_acknowledged_it() -> None:
    stage = running("a", "b").says("a", State.SUCCEEDED, 1).says("b", State.SUCCEEDED, 1)
    assert not stage.decide().done
    assert not stage.says("a", State.LEFT, 1).decide().done
    assert stage.says("b", State.LEFT, 1).decide().done


def test_the_verdict_is_not_kept_for_the_dead() -> None:
    stage = running("a", "b").says("a", State.SUCCEEDED, 1).says("b", State.SUCCEEDED, 1)
    assert stage.says("a", State.LEFT, 1).dies("b").wait(6.0).decide().done


def test_a_second_agent_with_the_id_of_a_living_node_is_refused() -> None:
    stage = running("a", "b").arrives("b.2").wait(1.0)
    assert not stage.plan.refused
    stage.wait(1.0)
    assert list(stage.plan.refused) == ["b.2"]
    assert "held by a living agent" in stage.plan.refused["b.2"]


def test_a_restarted_agent_is_not_refused_when_its_predecessors_last_renewal_is_noticed_late() -> None:
    stage = running("a", "b").dies("b").arrives("b.2")
    stage.leases["b"] = stage.leases["b"].renewed()
    stage.coordinator.observe(stage.members["b"], stage.leases["b"], stage.now_s + 0.1)
    assert not stage.wait(5.0).plan.refused


def test_a_lease_longer_than_the_runs_is_refused() -> None:
    stage = running("a", "b")
    stage.leases["c"] = stage.leases["a"].__class__("c", 60.0)
    stage.says("c", State.READY, 0)
    assert "--lease-ttl" in stage.plan.refused["c"]
