"""Graceful shutdown: which workers get a notice, what is waited for, and what follows."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from elastic_agent.protocol.codec import RecordError, decode, encode
from elastic_agent.protocol.node import (
    Activity,
    Announce,
    Depart,
    Grace,
    Node,
    Notify,
    Outcome,
    Prepare,
    RequestStop,
    StopWorkers,
)
from elastic_agent.protocol.records import (
    Cause,
    Growth,
    History,
    Notice,
    Phase,
    Policy,
    State,
    StopRequest,
)
from tests.protocol.support import (
    CRASH,
    MARGIN_S,
    NO_START,
    SETTLE_S,
    STEP_S,
    TTL_S,
    Table,
    plan,
    policy,
    running,
    world,
)
from tests.protocol.test_node import ended, forming, sealed
from tests.protocol.test_node import running as running_node
from tests.protocol.test_node import starting as starting_node

FORMING, RUNNING, STOPPED = Phase.FORMING, Phase.RUNNING, Phase.STOPPED
TIME_S = 30.0
OVER = msgspec.structs.replace(sealed(1, 9, "a-1", "b-1"), phase=STOPPED, reason="SIGUSR1 at b")


def leave(node: str, serial: int = 1, left_s: float = TIME_S) -> StopRequest:
    return StopRequest(serial, Cause.DRAIN, left_s, f"{node} leaves", leaver=node, life=1)


def stop(serial: int = 1, cause: Cause = Cause.PREEMPTED, left_s: float = TIME_S) -> StopRequest:
    return StopRequest(serial, cause, left_s, "SIGUSR1 at a", life=1)


def handling_notices(*nodes: str, rules: Policy | None = None) -> Table:
    """A table at which these nodes run, with workers that look at notices."""
    table = running(*nodes, rules=rules or policy())
    for node in nodes:
        table.says(node, State.RUNNING, handles_notices=True)
    return table


def asks(table: Table, node: str, stop_request: StopRequest) -> None:
    """The node goes on as it was, with this ask in its record."""
    known = table.members[table.newest[node]]
    table.says(node, known.state, known.generation, stop_request=stop_request)


def notice(table: Table) -> Notice:
    assert table.plan.notice is not None, "no notice was given"
    return table.plan.notice


# -- a node leaves ------------------------------------------------------------------------------


@pytest.mark.parametrize("goes", [State.LEFT, State.READY], ids=["left", "ready"])
def test_all_workers_get_the_notice_and_the_others_continue_when_all_have_exited(goes: State) -> None:
    """The node that is to leave gets no seat even if it is ready."""
    table = handling_notices("a", "b", "c")
    asks(table, "b", leave("b"))
    assert table.stand == (RUNNING, 1)
    assert (notice(table).cause, notice(table).left_s, notice(table).ends) == (Cause.DRAIN, TIME_S, False)
    table.wait(TIME_S / 2)
    table.all_say(State.SAVED, "a", "b")
    assert table.stand == (RUNNING, 1), "c still saves"
    table.says("c", State.SAVED)
    assert (table.stand, table.plan.reason) == ((FORMING, 2), "b leaves")
    table.all_say(State.READY, "a", "c")
    assert table.stand == (FORMING, 2), "b is not gone yet"
    table.says("b", goes)
    assert (table.stand, table.world, table.plan.charged) == ((RUNNING, 2), ["a", "c"], 0)
    assert table.plan.notice is None


def test_a_node_can_drain_another_whose_next_incarnation_may_join() -> None:
    table = handling_notices("a", "b", "c")
    asks(table, "a", leave("c"))
    table.all_say(State.SAVED, "a", "b", "c")
    table.all_say(State.READY, "a", "b")
    table.says("c", State.LEFT)
    table.all_say(State.RUNNING, "a", "b")
    table.comes("c", life=2, replaces=("c-1",))
    table.wait(SETTLE_S)
    assert table.plan.leaving == (), "the ask that was heard once is not heard again"
    assert (table.stand, notice(table).cause) == ((RUNNING, 2), Cause.GROW)
    table.all_say(State.SAVED, "a", "b")
    table.all_say(State.READY, "a", "b", "c")
    assert table.world == ["a", "b", "c"]


# -- the last node leaves -----------------------------------------------------------------------

ALONE = "a leaves; no other node can continue the run"


def test_the_run_is_stopped_when_its_only_node_leaves() -> None:
    table = handling_notices("a", rules=policy(min_nodes=1))
    asks(table, "a", leave("a"))
    assert table.stand == (RUNNING, 1)
    assert (notice(table).cause, notice(table).left_s, notice(table).ends) == (Cause.DRAIN, TIME_S, True)
    table.says("a", State.SAVED)
    assert (table.stand, table.plan.reason) == ((STOPPED, 1), ALONE)


def test_the_run_is_stopped_at_once_when_its_only_node_leaves_and_no_workers_handle_notices() -> None:
    forming_alone = Table(policy(min_nodes=2))
    forming_alone.comes("a")
    for table in (forming_alone, running("a", rules=policy(min_nodes=1))):
        asks(table, "a", leave("a"))
        assert (table.stand, table.plan.reason) == ((STOPPED, 1), ALONE)
    table.says("a", State.LEFT)
    table.comes("a", life=2)
    table.says("a", State.READY, 2)
    assert table.plans[-2].reason == "resuming the run after generation 1, in which it was stopped"


def test_the_run_continues_when_another_node_only_waits() -> None:
    table = handling_notices("a", rules=policy(min_nodes=1, max_nodes=1))
    table.comes("b")
    asks(table, "a", leave("a"))
    assert not notice(table).ends
    table.says("a", State.SAVED)
    table.says("a", State.LEFT)
    table.says("b", State.READY, 2)
    assert (table.stand, table.world) == ((RUNNING, 2), ["b"])


def test_the_run_continues_when_another_node_may_return() -> None:
    """It lost its lease, and its workers may still run: it may register again at any moment."""
    table = handling_notices("a", "b", rules=policy(min_nodes=1))
    table.falls_silent("b")
    table.wait(TTL_S + STEP_S)
    table.says("a", State.READY, 2)
    asks(table, "a", leave("a"))
    assert (table.plan.phase, len(table.plan.leaving)) == (FORMING, 1)


def test_the_run_continues_when_a_node_leaves_that_is_the_first_to_register_in_a_new_store() -> None:
    """The store was lost during a notice: the other nodes are about to register, too."""
    table = Table(policy(min_nodes=1), remembered=History(7, world(7, "a-1", "b-1"), 0, ("a", "b")))
    table.comes("b", state=State.SAVED, generation=7)
    asks(table, "b", leave("b"))
    assert (table.plan.phase, table.plan.leaving) == (FORMING, ("b-1",))
    table.says("b", State.LEFT)
    table.comes("a", state=State.SAVED, generation=7)
    table.says("a", State.READY, table.plan.generation)
    assert (table.plan.phase, table.world) == (RUNNING, ["a"])


def test_the_run_is_stopped_when_no_other_node_has_registered_in_a_new_store_for_a_lease() -> None:
    table = Table(policy(min_nodes=1), remembered=History(7, world(7, "a-1", "b-1"), 0, ("a", "b")))
    table.comes("b", state=State.SAVED, generation=7)
    table.says("b", State.READY, table.plan.generation)
    table.wait(TTL_S + MARGIN_S - STEP_S)
    assert table.plan.phase is FORMING
    table.wait(STEP_S)
    table.says("b", State.READY, table.plan.generation)
    asks(table, "b", leave("b"))
    assert table.plan.phase is STOPPED


def test_the_run_is_stopped_when_all_nodes_leave_together() -> None:
    table = handling_notices("a", "b", rules=policy(min_nodes=1))
    asks(table, "a", leave("a"))
    assert not notice(table).ends
    asks(table, "b", leave("b"))
    assert notice(table).ends
    table.all_say(State.SAVED, "a", "b")
    assert table.stand == (STOPPED, 1)


def test_a_node_that_was_told_to_leave_does_not_speak_for_the_run_that_another_stops() -> None:
    table = handling_notices("a", "b")
    asks(table, "a", leave("a"))
    table.all_say(State.SAVED, "a", "b")
    asks(table, "b", leave("b"))
    assert (table.plan.phase, table.plan.requeuer) == (STOPPED, "b-1"), (
        "a may have left, its lease still stands"
    )


def test_a_request_to_drain_an_unknown_node_or_by_another_agent_of_the_same_id_has_no_effect() -> None:
    table = handling_notices("a", "b")
    asks(table, "a", leave("nobody"))
    assert (table.stand, table.plan.notice, table.plan.leaving) == ((RUNNING, 1), None, ())
    table.comes("a", life=2)
    asks(table, "a", leave("a"))
    assert (table.stand, table.plan.notice, table.plan.leaving) == ((RUNNING, 1), None, ())


def test_at_the_deadline_the_next_world_forms_even_if_workers_still_save() -> None:
    table = handling_notices("a", "b", "c")
    asks(table, "b", leave("b"))
    table.says("a", State.SAVED)
    table.wait(TIME_S - STEP_S)
    assert table.stand == (RUNNING, 1)
    table.wait(STEP_S)
    assert table.stand == (FORMING, 2)
    table = running("a", "b", "c")
    asks(table, "b", leave("b"))
    assert table.stand == (FORMING, 2), "workers that do not handle notices are not waited for"
    table = handling_notices("a", "b")
    table.says("a", State.SAVED)
    assert (table.stand, table.plan.charged) == ((FORMING, 2), 0), (
        "without a notice, that ends the generation"
    )


def test_a_failure_during_a_notice_is_charged_and_the_leaver_still_leaves() -> None:
    table = handling_notices("a", "b", "c")
    asks(table, "b", leave("b"))
    table.says("c", State.FAILED, failure=CRASH)
    assert table.stand == (FORMING, 2)
    assert table.plan.leaving == ("b-1",)
    table.all_say(State.READY, "a", "c")
    table.says("b", State.LEFT)
    assert (table.stand, table.world, table.plan.notice) == ((RUNNING, 2), ["a", "c"], None)


def requests_to_drain_a_node_without_a_lease() -> Table:
    """c has lost its lease, and a requests that c leaves."""
    table = handling_notices("a", "b", "c")
    table.falls_silent("c")
    while "c-1" not in table.revoked:
        table.wait(STEP_S)
    asks(table, "a", leave("c"))
    return table


def test_a_node_that_is_drained_while_it_has_no_lease_leaves_when_it_registers_again() -> None:
    table = requests_to_drain_a_node_without_a_lease()
    assert (table.plan.leaving, table.plan.acknowledged) == ((), {})
    table.comes("c", life=2, replaces=("c-1",))
    assert table.plan.leaving == ("c-2",)
    table.all_say(State.READY, "a", "b", "c")
    assert table.world == ["a", "b"]


def test_a_restarted_node_is_drained_also_while_its_predecessor_counts_as_alive() -> None:
    table = handling_notices("a", "b", "c")
    table.falls_silent("c")
    table.comes("c", life=2)
    asks(table, "a", leave("c"))
    assert table.plan.leaving == ("c-1", "c-2")
    while "c-1" in table.plan.leaving:
        table.wait(STEP_S)
    table.all_say(State.READY, "a", "b", "c")
    assert (table.stand, table.world, table.plan.leaving) == ((RUNNING, 2), ["a", "b"], ("c-2",))


def test_a_request_to_drain_a_node_whose_workers_are_certainly_gone_is_acknowledged() -> None:
    table = requests_to_drain_a_node_without_a_lease()
    table.wait(TTL_S + MARGIN_S)
    assert (table.plan.leaving, table.plan.acknowledged) == ((), {"a-1": 1})


def test_a_node_without_running_workers_leaves_without_a_notice() -> None:
    standby, succeeded = handling_notices("a", "b", "c", "d"), running("a", "e")
    standby.comes("e")
    succeeded.says("e", State.SUCCEEDED)
    for table in (standby, succeeded):
        asks(table, "e", leave("e"))
        assert (table.stand, table.plan.notice, table.plan.leaving) == ((RUNNING, 1), None, ("e-1",))
    standby.says("e", State.LEFT, 0)
    assert standby.stand == (RUNNING, 1)


# -- the run ends -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "phase", "reason"),
    [
        (State.SAVED, State.SAVED, STOPPED, "SIGUSR1 at a"),
        (State.SUCCEEDED, State.SAVED, STOPPED, "SIGUSR1 at a"),
        (State.SUCCEEDED, State.SUCCEEDED, Phase.FINISHED, "generation 1 succeeded on 2 nodes"),
    ],
)
def test_the_run_is_stopped_when_all_workers_have_exited_unless_all_succeeded(
    a: State, b: State, phase: Phase, reason: str
) -> None:
    table = handling_notices("a", "b")
    asks(table, "a", stop())
    assert notice(table).ends
    table.says("b", b)
    assert table.stand == (RUNNING, 1)
    table.says("a", a)
    assert (table.stand, table.plan.reason) == ((phase, 1), reason)


@pytest.mark.parametrize(
    ("cause", "waits"), [(Cause.PREEMPTED, True), (Cause.WALLTIME, True), (Cause.OPERATOR, False)]
)
def test_workers_that_do_not_handle_notices_run_until_the_deadline_unless_an_operator_stops_them(
    cause: Cause, waits: bool
) -> None:
    table = running("a", "b")
    asks(table, "a", stop(cause=cause))
    if waits:
        table.wait(TIME_S - STEP_S)
        assert table.stand == (RUNNING, 1)
        table.wait(STEP_S)
    assert table.stand == (STOPPED, 1)
    table = Table(policy())
    table.comes("a")
    asks(table, "a", stop(cause=cause))
    assert table.stand == (STOPPED, 1), "there are no workers while the run forms"


def test_requests_of_several_nodes_become_one_notice_with_the_earliest_deadline() -> None:
    table = handling_notices("a", "b", "c")
    asks(table, "a", stop(left_s=60.0))
    table.wait(10.0)
    asks(table, "b", stop(left_s=20.0))
    assert notice(table).left_s == 20.0
    asks(table, "b", stop(serial=2, left_s=60.0))
    assert notice(table).left_s == 20.0, "an end that was told does not move away"
    asks(table, "c", leave("c", left_s=10.0))
    assert (notice(table).ends, notice(table).cause, notice(table).left_s) == (True, Cause.PREEMPTED, 10.0)


def test_a_notice_survives_the_loss_of_a_node_that_is_saving() -> None:
    table = handling_notices("a", "b", "c")
    asks(table, "a", stop())
    table.falls_silent("c")
    table.wait(TTL_S)
    assert table.stand == (FORMING, 2)
    table.all_say(State.READY, "a", "b")
    table.wait(2.0)
    assert (table.stand, notice(table).ends) == ((RUNNING, 2), True), "the workers of the next world are told"
    assert notice(table).left_s == pytest.approx(TIME_S - TTL_S - MARGIN_S, abs=1.0), "of what remains"
    table.all_say(State.RUNNING, "a", "b")
    table.wait(TIME_S)
    assert table.stand == (STOPPED, 2)


def test_a_stop_survives_the_report_of_a_later_generation() -> None:
    table = handling_notices("a", "b")
    asks(table, "a", stop())
    table.comes("c", history=History(6, world(6, "c-0", "d-0"), 0, ("c", "d")))
    assert (table.stand, notice(table).ends) == ((FORMING, 7), True)


def test_a_node_lost_after_it_has_saved_does_not_count_as_lost() -> None:
    table = handling_notices("a", "b")
    asks(table, "a", stop())
    table.says("b", State.SAVED)
    table.falls_silent("b")
    table.wait(2 * TTL_S)
    assert table.stand == (RUNNING, 1)
    table.says("a", State.SAVED)
    assert table.stand == (STOPPED, 1)


# -- and goes on later --------------------------------------------------------------------------


def test_a_stopped_run_resumes_above_its_generation_with_its_budget() -> None:
    table = Table(remembered=History(7, None, 2, ("a", "b"), STOPPED, settled=True))
    table.comes("a")
    assert (table.stand, table.plan.charged, table.plan.order) == ((FORMING, 8), 2, ("a", "b"))


def test_a_node_that_joins_after_the_stop_resumes_the_run() -> None:
    table = handling_notices("a", "b")
    asks(table, "a", stop())
    table.all_say(State.SAVED, "a", "b")
    table.wait(STEP_S)
    table.comes("a", life=2)
    table.says("a", State.READY, 2)
    assert table.stand == (STOPPED, 1), "not every node has acknowledged it"
    table.life_says("a-1", State.LEFT)
    table.says("b", State.LEFT)
    assert table.stand == (FORMING, 2)


def test_a_standby_node_does_not_undo_a_stop_that_it_has_not_read() -> None:
    """Neither where another coordinator sees it for the first time, nor however long it is cut off."""
    table = handling_notices("a", "b", rules=policy(max_nodes=2))
    table.comes("c")
    asks(table, "a", stop())
    table.all_say(State.SAVED, "a", "b")
    table.all_say(State.LEFT, "a", "b")
    table.change_coordinator()
    assert table.stand == (STOPPED, 1)
    table.wait(3 * TTL_S)
    assert table.stand == (STOPPED, 1)
    table.says("c", State.LEFT)
    assert table.last.done


def test_a_node_that_lost_its_lease_during_the_stop_does_not_resume_the_run() -> None:
    table = handling_notices("a", "b")
    asks(table, "a", stop())
    table.all_say(State.SAVED, "a", "b")
    table.wait(STEP_S)
    table.comes("b", life=2, replaces=("b-1",))
    table.says("a", State.LEFT)
    assert table.stand == (STOPPED, 1), "it has yet to hear of the stop"
    table.says("b", State.LEFT)
    assert table.stand == (STOPPED, 1)
    assert table.last.done


def test_a_stopped_run_is_not_resumed_while_its_workers_may_run() -> None:
    table = running("a", "b", rules=policy(min_nodes=1))
    for node in ("a", "b"):
        table.says(node, State.RUNNING, stop_s=4 * TTL_S)
    asks(table, "a", stop(cause=Cause.OPERATOR))
    table.says("b", State.LEFT)
    table.comes("b", life=2, replaces=("b-1",))
    table.says("b", State.READY, 2)
    table.wait(3 * TTL_S)
    assert table.stand == (STOPPED, 1), "a takes longer to stop its workers than the verdict is kept"
    assert not table.last.done
    table.says("a", State.LEFT)
    assert (table.stand, table.world) == ((RUNNING, 2), ["b"])


# -- growth -------------------------------------------------------------------------------------


def test_workers_that_handle_notices_save_before_a_node_joins() -> None:
    table = handling_notices("a", "b")
    table.comes("c")
    table.wait(SETTLE_S)
    assert (table.stand, notice(table).cause) == ((RUNNING, 1), Cause.GROW)
    table.comes("d")
    table.all_say(State.SAVED, "a", "b")
    assert (table.stand, table.plan.joining) == ((FORMING, 2), ("c", "d")), "one restart lets both in"
    table.all_say(State.READY, "a", "b", "c", "d")
    assert table.world == ["a", "b", "c", "d"]


@pytest.mark.parametrize("comes_in_time", [True, False])
def test_nodes_for_which_a_world_was_ended_get_the_time_of_a_lease_to_become_ready(
    comes_in_time: bool,
) -> None:
    """Not only --settle: without them, the world would have been ended for nothing."""
    table = handling_notices("a", "b", rules=policy(settle_s=0.1))
    table.comes("c")
    table.wait(SETTLE_S)
    table.all_say(State.SAVED, "a", "b")
    table.all_say(State.READY, "a", "b")
    table.wait(TTL_S - STEP_S)
    assert table.stand == (FORMING, 2)
    if comes_in_time:
        table.says("c", State.READY)
    else:
        table.wait(STEP_S)
    assert (table.stand, table.world) == ((RUNNING, 2), ["a", "b", "c"] if comes_in_time else ["a", "b"])


def test_workers_that_do_not_handle_notices_are_restarted_after_the_delay() -> None:
    table = running("a", "b", rules=policy(grow_delay_s=10.0))
    table.comes("c")
    table.wait(8.0)
    table.comes("d")
    table.wait(10.0 - STEP_S)
    assert table.stand == (RUNNING, 1), "joins that come close together cost one restart"
    table.wait(STEP_S)
    assert (table.stand, table.plan.joining) == ((FORMING, 2), ("c", "d"))


def test_with_at_notice_a_world_grows_only_if_its_workers_handle_notices() -> None:
    rules = policy(grow=Growth.AT_NOTICE)
    table = running("a", "b", rules=rules)
    table.comes("c")
    table.wait(60.0)
    assert table.stand == (RUNNING, 1)
    table.says("a", State.RUNNING, handles_notices=True)
    assert notice(table).cause is Cause.GROW


def test_with_never_only_former_participants_join_a_running_world() -> None:
    table = running("a", "b", "c", rules=policy(grow=Growth.NEVER))
    table.falls_silent("c")
    table.wait(TTL_S)
    table.all_say(State.READY, "a", "b")
    table.wait(2.0)
    table.all_say(State.RUNNING, "a", "b")
    table.comes("d")
    table.wait(60.0)
    assert (table.stand, table.world) == ((RUNNING, 2), ["a", "b"]), table.plan.reason
    table.comes("c", life=2)
    table.wait(SETTLE_S)
    assert (table.stand, table.plan.joining) == ((FORMING, 3), ("c",))


@pytest.mark.parametrize(
    ("counts", "sizes"), [((2,), {2: 2, 3: 2, 4: 4, 5: 4}), ((1, 2, 4), {3: 2, 4: 4, 5: 4})]
)
def test_only_worlds_of_allowed_sizes_are_sealed(counts: tuple[int, ...], sizes: dict[int, int]) -> None:
    for nodes, size in sizes.items():
        table = Table(policy(min_nodes=2, max_nodes=6, node_counts=counts))
        for number in range(nodes):
            table.comes(f"n{number}")
        table.wait(3 * SETTLE_S)
        assert (table.stand, len(table.world)) == ((RUNNING, 1), size)


def test_a_world_of_an_allowed_size_waits_for_enough_nodes_and_does_not_grow_by_a_surplus_node() -> None:
    table = Table(policy(min_nodes=2, max_nodes=8, node_counts=(4,)))
    for node in ("a", "b", "c"):
        table.comes(node)
    table.wait(10.0)
    assert "waiting for 1 more node (at least 4 required)" in table.last.reason
    table = running("a", "b", rules=policy(max_nodes=6, node_counts=(2,)))
    table.comes("c")
    table.wait(60.0)
    assert table.stand == (RUNNING, 1)
    table.comes("d")
    table.wait(SETTLE_S)
    assert table.stand == (FORMING, 2)


def test_nodes_that_failed_to_start_stay_in_a_world_that_needs_them() -> None:
    table = running("a", "b", rules=policy(min_nodes=1, node_counts=(2,)))
    for generation in (1, 2):
        table.says("b", State.FAILED, failure=NO_START)
        assert table.stand == (FORMING, generation + 1)
        table.all_say(State.READY, "a", "b")
        table.wait(SETTLE_S)
        assert (table.stand, table.world) == ((RUNNING, generation + 1), ["a", "b"]), table.last.reason


def test_a_policy_without_an_allowed_size_is_invalid() -> None:
    rules = Policy(min_nodes=5, max_nodes=7, node_counts=(4,))
    table = running("a", "b")
    with pytest.raises(RecordError, match="allows none of these counts"):
        decode(type(table.plan), encode(msgspec.structs.replace(table.plan, policy=rules)))


# -- one node's side ----------------------------------------------------------------------------


@pytest.mark.parametrize("begin", [starting_node, running_node])
def test_a_notice_is_delivered_once_to_workers_that_run_or_are_being_started(
    begin: Callable[[], Node],
) -> None:
    node, told = begin(), Notice(3, Cause.GROW, 60.0, "c wants to join")
    plan = msgspec.structs.replace(sealed(1, 3, "a-1", "b-1"), notice=told)
    assert node.plan_changed(plan) == [Notify(told)]
    assert node.plan_changed(msgspec.structs.replace(plan, version=4)) == []
    newer = msgspec.structs.replace(told, serial=5, ends=True)
    assert node.plan_changed(msgspec.structs.replace(plan, version=5, notice=newer)) == [Notify(newer)]


def test_a_drained_node_requests_a_notice_and_leaves_when_the_next_world_forms() -> None:
    node = running_node()
    stop_request = leave("a")
    assert node.drain("SIGTERM received", stop_request) == [RequestStop(stop_request)]
    assert node.saved(1) == [Announce(State.SAVED, 1)]
    plan = forming(2, 4, leaving=("a-1",), acknowledged={"a-1": 1})
    assert node.plan_changed(plan) == [
        RequestStop(None),
        Announce(State.LEFT, 2),
        Depart(Outcome.DRAINED, "SIGTERM received"),
    ]


def test_a_node_that_lost_its_lease_before_it_read_that_it_is_to_leave_leaves_when_it_registers_again() -> (
    None
):
    node = rejoined()
    assert node.plan_changed(forming(2, 4, leaving=("a-1",), reason="a is told to leave")) == [
        Announce(State.LEFT, 2),
        Depart(Outcome.DRAINED, "a is told to leave"),
    ]


def test_a_node_that_takes_the_place_of_another_that_was_to_leave_does_not_leave() -> None:
    assert Node("a-2").plan_changed(forming(2, 4, leaving=("a-1",))) == [Announce(State.READY, 2)]


def test_an_unanswered_drain_request_is_carried_out_locally() -> None:
    node = running_node()
    node.drain("SIGTERM received", leave("a"))
    assert node.leave_now() == [Announce(State.LEAVING, 1), StopWorkers(Grace.DRAIN, "SIGTERM received")]
    assert node.leave_now() == []


def rejoined(node: Node | None = None) -> Node:
    """Node a, which has lost its lease and registers as a-2."""
    node = node or running_node()
    node.lease_lost("the lease ran out")
    node.stopped()
    node.rejoined("a-2")
    return node


def stopping_soon(ends: bool = True) -> Node:
    """Node a, whose workers were told when the run is stopped, or that b leaves."""
    node = running_node()
    told = Notice(3, Cause.WALLTIME, TIME_S, "SIGUSR1 at b", ends=ends)
    node.plan_changed(msgspec.structs.replace(sealed(1, 3, "a-1", "b-1"), notice=told))
    return node


def waiting_outside_the_world() -> Node:
    node = Node("c-1")
    node.plan_changed(sealed(1, 8, "a-1", "b-1"))
    return node


def succeeded() -> Node:
    node = running_node()
    node.succeeded(1)
    return node


def between_generations() -> Node:
    node = running_node()
    node.plan_changed(forming(2, 3))
    node.stopped()
    return node


@pytest.mark.parametrize("idle", [waiting_outside_the_world, succeeded, between_generations])
def test_a_node_without_workers_leaves_when_the_coordinator_knows_and_no_other_node_has_the_run_end(
    idle: Callable[[], Node],
) -> None:
    for all_leave in (False, True):
        node = idle()
        requested = node.drain("SIGTERM received", leave("a"))
        assert [action for action in requested if isinstance(action, RequestStop)] == requested != []
        assert node.plan is not None
        plan = msgspec.structs.replace(
            node.plan, version=9, leaving=(node.incarnation,), acknowledged={node.incarnation: 1}
        )
        assert not any(isinstance(action, Depart) for action in node.plan_changed(plan))
        if all_leave:
            actions = node.plan_changed(
                msgspec.structs.replace(plan, version=10, phase=STOPPED, reason="all leave")
            )
            assert actions[-1] == Depart(Outcome.STOPPED, "all leave")
        else:
            assert node.leave_now()[-1] == Depart(Outcome.DRAINED, "SIGTERM received")


@pytest.mark.parametrize("first", ["a", "c"])
@pytest.mark.parametrize("state", [State.READY, State.SUCCEEDED])
def test_a_run_is_stopped_when_its_nodes_with_and_without_workers_are_to_leave(
    first: str, state: State
) -> None:
    """Whether the node without workers waits to join, or its workers have succeeded."""
    rules = policy(min_nodes=1)
    table = running("a", rules=rules) if state is State.READY else running("a", "c", rules=rules)
    if state is State.READY:
        table.comes("c")
    else:
        table.says("c", State.SUCCEEDED)
    for node in (first, *{"a", "c"} - {first}):
        asks(table, node, leave(node))
    assert table.plan.phase is STOPPED


def test_a_node_whose_lease_is_lost_leaves_without_a_request() -> None:
    node = running_node()
    node.lease_lost("the lease ran out")
    node.drain("SIGTERM received", leave("a"))
    assert node.stopped()[-1] == Depart(Outcome.DRAINED, "SIGTERM received")


def test_a_drained_node_with_which_the_run_ends_does_not_also_leave_it() -> None:
    """A command waits until its workers have exited; meanwhile the time for the coordinator's answer is over."""
    node = running_node()
    node.drain("asked", leave("a"))
    node.linger()
    over = msgspec.structs.replace(OVER, uncleared=world(1, "a-1").seats)
    assert node.plan_changed(over) == [StopWorkers(Grace.DRAIN, "SIGUSR1 at b")]
    assert node.leave_now() == []
    node.stopped()
    cleared = msgspec.structs.replace(over, version=10, uncleared=())
    assert node.plan_changed(cleared)[-1] == Depart(Outcome.STOPPED, "SIGUSR1 at b")


def test_workers_still_there_at_the_deadline_get_the_time_of_a_drain() -> None:
    node = running_node()
    assert node.plan_changed(forming(2, 3, leaving=("a-1",), reason="a leaves")) == [
        StopWorkers(Grace.DRAIN, "a leaves")
    ]
    assert node.stopped()[-1] == Depart(Outcome.DRAINED, "a leaves")


def test_a_stop_ends_participants_but_not_nodes_that_join_later() -> None:
    node = running_node()
    assert node.plan_changed(OVER) == [StopWorkers(Grace.DRAIN, "SIGUSR1 at b")]
    assert node.stopped()[-1] == Depart(Outcome.STOPPED, "SIGUSR1 at b")
    newcomer = Node("c-1")
    assert newcomer.plan_changed(OVER) == [Announce(State.READY, 2)]
    assert newcomer.plan_changed(forming(2, 10)) == [], "it said so already"
    assert newcomer.plan_changed(sealed(2, 11, "c-1")) == [Prepare(world(2, "c-1"))]


def test_a_stop_ends_every_node_that_was_part_of_the_run_or_stopped_it() -> None:
    """Also a participant that lost its lease meanwhile, one that stands by, and who asks for it and comes late."""
    asked = Node("c-1")
    asked.request_stop(stop())
    for node in (rejoined(), waiting_outside_the_world(), asked):
        assert node.plan_changed(OVER)[-1] == Depart(Outcome.STOPPED, "SIGUSR1 at b")
    late = Node("c-1")
    late.plan_changed(OVER)
    assert late.request_stop(stop())[-1] == Depart(Outcome.STOPPED, "SIGUSR1 at b")


def test_a_request_is_kept_until_it_has_taken_effect() -> None:
    node = running_node()
    node.request_stop(leave("b"))
    acknowledged = msgspec.structs.replace(sealed(1, 3, "a-1", "b-1"), acknowledged={"a-1": 1})
    assert node.plan_changed(acknowledged) == []
    assert node.plan_changed(forming(2, 4, acknowledged={"a-1": 1}))[0] == RequestStop(None)


def test_requests_from_before_a_resumed_stop_are_void() -> None:
    """The node that asked was cut off meanwhile, and comes back with the ask in its record."""
    for old in (stop(), leave("a")):
        table = handling_notices("a", "b")
        asks(table, "a", stop())
        table.all_say(State.SAVED, "a", "b")
        table.all_say(State.LEFT, "a", "b")
        table.comes("a", life=2)
        table.says("a", State.READY, 2)
        table.comes("c", generation=0, stop_request=old)
        assert (table.plan.phase, table.plan.life) == (FORMING, 2)
        asks(table, "c", msgspec.structs.replace(old, life=2))
        assert table.plan.phase is STOPPED or table.plan.leaving == ("a-2",)


def test_a_node_withdraws_requests_of_an_earlier_life_of_the_run() -> None:
    node = running_node()
    node.request_stop(stop())
    taken_up = msgspec.structs.replace(forming(2, 10), life=2)
    assert rejoined(node).plan_changed(taken_up) == [RequestStop(None), Announce(State.READY, 2)]


def test_a_request_before_the_first_plan_is_published_with_it() -> None:
    node = Node("c-1")
    assert node.request_stop(msgspec.structs.replace(stop(), life=0)) == []
    assert node.plan_changed(forming(1, 1)) == [RequestStop(stop()), Announce(State.READY, 1)]


def test_a_stop_request_is_repeated_in_a_new_store_by_every_node_that_knows_it() -> None:
    """The one who asked for it may have read there that it is stopped, and gone."""
    again = RequestStop(StopRequest(1, Cause.WALLTIME, TIME_S, "SIGUSR1 at b", life=1))
    node = stopping_soon()
    assert node.store_replaced() == [node.announced, again]
    assert node.store_replaced() == [node.announced], "it stands in the member record"
    assert node.next_stop_request == 2
    assert rejoined(stopping_soon()).store_replaced()[-1] == again, (
        "also if the lease was lost with the store"
    )
    resumed = rejoined(stopping_soon())
    resumed.plan_changed(forming(2, 10))
    assert resumed.store_replaced() == [resumed.announced], "it is forgotten"


def test_a_stop_that_was_read_while_the_lease_was_lost_is_repeated_in_a_new_store() -> None:
    """Its workers may need long to stop, and the store be lost meanwhile, with the history of the run."""
    node = running_node()
    node.failed(1, CRASH)
    node.lease_lost("the store is gone")
    told = Notice(3, Cause.OPERATOR, TIME_S, "operator at b", ends=True)
    node.plan_changed(msgspec.structs.replace(ended(STOPPED, 1, 9), notice=told))
    again = RequestStop(StopRequest(1, Cause.OPERATOR, TIME_S, "operator at b", life=1))
    assert rejoined(node).store_replaced()[-1] == again


@pytest.mark.parametrize("ends", [True, False])
def test_a_nodes_own_request_stays_in_its_record(ends: bool) -> None:
    node = running_node()
    own = stop() if ends else leave("b")
    node.request_stop(own)
    milder = Notice(3, Cause.DRAIN, TIME_S, "b leaves", ends=False)
    node.plan_changed(msgspec.structs.replace(sealed(1, 3, "a-1", "b-1"), notice=milder))
    assert node.store_replaced() == [node.announced]


def test_handling_of_notices_is_reported_once() -> None:
    node = running_node()
    assert node.handles_notices(1) == [Announce(State.RUNNING, 1, handles_notices=True)]
    assert node.handles_notices(1) == []
    assert node.activity is Activity.RUNNING


# -- when commands return -----------------------------------------------------------------------


def test_a_node_counts_as_leaving_until_its_workers_have_exited() -> None:
    table = handling_notices("a", "b")
    asks(table, "a", leave("b"))
    table.life_says("b-1", State.SAVED, 1)
    table.life_says("a-1", State.SAVED, 1)
    assert table.stand == (Phase.FORMING, 2)
    table.says("a", State.READY)
    table.life_says("b-1", State.LEAVING, 1)
    assert table.plan.leaving == ("b-1",)
    table.life_says("b-1", State.LEFT, 2)
    assert table.plan.leaving == ()


@pytest.mark.parametrize("registers_again", [False, True])
def test_a_leaving_node_that_is_lost_counts_as_gone_when_it_is_fenced_or_has_left(
    registers_again: bool,
) -> None:
    table = handling_notices("a", "b")
    asks(table, "a", leave("b"))
    table.falls_silent("b")
    if registers_again:
        table.comes("b", life=2, replaces=("b-1",))
        assert table.plan.leaving == ("b-1",)
        table.says("b", State.LEFT)
    else:
        table.wait(TTL_S)
        assert table.plan.leaving == ("b-1",)
        table.wait(MARGIN_S + STEP_S)
    assert table.plan.leaving == ()


def test_a_restarted_agent_of_a_node_that_was_to_leave_joins_the_run() -> None:
    table = handling_notices("a", "b")
    asks(table, "a", leave("b"))
    table.falls_silent("b")
    table.comes("b", life=2, replaces=("b-1",))
    table.all_say(State.SAVED, "a")
    while table.plan.phase is RUNNING:
        table.wait(STEP_S)
    table.all_say(State.READY, "a", "b")
    table.wait(SETTLE_S)
    assert table.world == ["a", "b"]
    table.wait(TTL_S + MARGIN_S)
    assert table.plan.leaving == ()


def test_a_stop_is_published_again_when_the_last_worker_has_exited() -> None:
    table = handling_notices("a", "b")
    asks(table, "a", stop())
    table.life_says("a-1", State.SAVED, 1)
    table.life_says("b-1", State.SAVED, 1)
    assert table.stand == (Phase.STOPPED, 1)
    table.life_says("a-1", State.STOPPED, 1)  # it lingers: a command waits
    assert [seat.node_id for seat in table.plan.uncleared] == ["a", "b"]
    table.life_says("b-1", State.LEFT, 1)
    assert (table.plan.phase, table.plan.uncleared) == (Phase.STOPPED, ())
    assert not table.last.done, "a has yet to acknowledge it"
    table.life_says("a-1", State.LEFT, 2)
    assert table.last.done


def lingering_node() -> Node:
    """In a stopped run: its own worker has exited, that of b has not."""
    node = Node("a-1")
    sealed = world(1, "a-1", "b-1")
    node.plan_changed(plan(Phase.FORMING, 1, 1))
    node.plan_changed(plan(Phase.RUNNING, 1, 2, world=sealed))
    node.prepared(1)
    node.started(1)
    node.linger()
    stopping = node.plan_changed(plan(Phase.STOPPED, 1, 3, world=sealed, uncleared=sealed.seats))
    assert [type(one) for one in stopping] == [StopWorkers]
    assert node.stopped() == [Announce(State.STOPPED, 1)]
    return node


def test_a_node_with_a_waiting_command_stays_until_the_others_have_exited_or_cannot_be_heard_of() -> None:
    node = lingering_node()
    assert node.drain("the deadline has passed") == []
    for next_plan in (plan(Phase.STOPPED, 1, 4), plan(Phase.FORMING, 2, 4)):
        assert lingering_node().plan_changed(next_plan) == [
            Announce(State.LEFT, next_plan.generation),
            Depart(Outcome.STOPPED, next_plan.reason),
        ]
    assert lingering_node().stop_lingering()[-1] == Depart(Outcome.STOPPED, "stopped 1")


def test_a_drain_request_does_not_withdraw_a_stop_request() -> None:
    """Both typed at a node that has yet to read that the run was stopped."""
    node = Node("c-1")
    node.request_stop(stop(node.next_stop_request))
    assert node.request_stop(leave("b", node.next_stop_request)) == []
    departs = node.plan_changed(plan(Phase.STOPPED, 1, 4))
    assert departs[-1] == Depart(Outcome.STOPPED, "stopped 1")
