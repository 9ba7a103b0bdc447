"""Graceful shutdown: which workers get a notice, what is waited for, and what follows."""

from __future__ import annotations

import msgspec
import pytest

from elastic_agent.protocol.records import (
    Cause,
    Growth,
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
    on_disk,
    policy,
    running,
    world,
)

FORMING, RUNNING, STOPPED = Phase.FORMING, Phase.RUNNING, Phase.STOPPED
TIME_S = 30.0


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
    assert table.last.reason.endswith("; waiting for the workers of a to save and exit")
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
    table = Table(policy(min_nodes=1), remembered=on_disk(7, world(7, "a-1", "b-1"), 0, ("a", "b")))
    table.comes("b", state=State.SAVED, generation=7)
    asks(table, "b", leave("b"))
    assert (table.plan.phase, table.plan.leaving) == (FORMING, ("b-1",))
    table.says("b", State.LEFT)
    table.comes("a", state=State.SAVED, generation=7)
    table.says("a", State.READY, table.plan.generation)
    assert (table.plan.phase, table.world) == (RUNNING, ["a"])


def test_the_run_is_stopped_when_no_other_node_has_registered_in_a_new_store_for_a_lease() -> None:
    table = Table(policy(min_nodes=1), remembered=on_disk(7, world(7, "a-1", "b-1"), 0, ("a", "b")))
    table.comes("b", state=State.SAVED, generation=7)
    table.says("b", State.READY, table.plan.generation)
    table.wait(TTL_S + MARGIN_S - STEP_S)
    assert table.plan.phase is FORMING
    table.wait(STEP_S)
    table.says("b", State.READY, table.plan.generation)
    asks(table, "b", leave("b"))
    assert table.plan.phase is STOPPED


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
    table = handling_notices("a", "b", "c")
    asks(table, "b", leave("b"))
    table.change_coordinator()
    table.wait(TIME_S)
    assert table.stand == (FORMING, 2), "another coordinator counts the time, too"
    table = running("a", "b", "c")
    asks(table, "b", leave("b"))
    assert table.stand == (FORMING, 2), "workers that do not handle notices are not waited for"
    table = handling_notices("a", "b")
    table.says("a", State.SAVED)
    assert (table.stand, table.plan.charged) == ((FORMING, 2), 0), (
        "without a notice, that ends the generation"
    )


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


# -- growth -------------------------------------------------------------------------------------


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


def test_a_node_joins_a_running_world_within_a_lease_however_long_the_first_world_was_waited_for() -> None:
    table = running("a", "b", rules=policy(settle_s=60.0))
    table.comes("c")
    table.wait(TTL_S - STEP_S)
    assert table.stand == (RUNNING, 1)
    table.wait(STEP_S)
    assert (table.stand, table.plan.joining) == ((FORMING, 2), ("c",))


def test_survivors_wait_a_lease_for_a_node_that_is_not_ready_however_long_the_first_world_was_waited_for() -> (
    None
):
    table = running("a", "b", rules=policy(settle_s=60.0))
    table.says("a", State.FAILED, failure=CRASH)
    table.comes("c", generation=1)
    table.all_say(State.READY, "a", "b")
    table.wait(TTL_S - STEP_S)
    assert table.stand == (FORMING, 2)
    table.wait(STEP_S)
    assert (table.stand, table.world) == ((RUNNING, 2), ["a", "b"])


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


# -- when commands return -----------------------------------------------------------------------


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
