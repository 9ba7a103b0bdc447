"""One node's side: when it says ready, when it starts workers, and what stops them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from elastic_agent.protocol.activity import TRANSITIONS, Activity, Event
from elastic_agent.protocol.node import (
    Announce,
    Depart,
    Grace,
    Node,
    Outcome,
    Prepare,
    Rejoin,
    StartWorkers,
    StopWorkers,
)
from elastic_agent.protocol.records import Failure, FailureKind, History, Phase, Plan, Refusal, State
from tests.protocol.support import CRASH, HANG, NO_START, plan, world

UNREACHABLE = Failure(FailureKind.BOOTSTRAP, "b:29500 could not be reached", unreachable_node="b")


def forming(generation: int, version: int, **fields: object) -> Plan:
    return plan(Phase.FORMING, generation, version, **fields)


def sealed(generation: int, version: int, *incarnations: str) -> Plan:
    return plan(Phase.RUNNING, generation, version, world=world(generation, *incarnations))


def ended(phase: Phase, generation: int, version: int) -> Plan:
    return plan(phase, generation, version, world=world(generation, "a-1", "b-1"), reason="it is over")


def waiting() -> Node:
    """Node a, which is ready for generation 1."""
    node = Node("a-1")
    assert node.plan_changed(forming(1, 1)) == [Announce(State.READY, 1)]
    return node


def preparing() -> Node:
    """Node a, which prepares to start generation 1."""
    node = waiting()
    assert node.plan_changed(sealed(1, 2, "a-1", "b-1")) == [Prepare(world(1, "a-1", "b-1"))]
    return node


def starting() -> Node:
    """Node a, which starts the workers of generation 1."""
    node = preparing()
    assert node.prepared(1) == [StartWorkers(world(1, "a-1", "b-1"))]
    return node


def running() -> Node:
    """Node a, whose workers of generation 1 run."""
    node = starting()
    assert node.started(1) == [Announce(State.RUNNING, 1)]
    return node


def stopping() -> Node:
    """Node a, which stops its workers because generation 2 forms."""
    node = running()
    node.plan_changed(forming(2, 3))
    assert node.activity is Activity.STOPPING
    return node


# -- the table of transitions -----------------------------------------------------------------------


def test_an_event_outside_the_table_is_ignored_and_reported() -> None:
    reported: list[tuple[Activity, Event]] = []
    node = Node("a-1", ignored=lambda activity, event: reported.append((activity, event)))
    node.plan_changed(forming(1, 1))
    assert node.started(1) == [] == node.stopped()
    assert reported == [(Activity.IDLE, Event.STARTED), (Activity.IDLE, Event.STOPPED)]
    assert node.activity is Activity.IDLE


def test_an_event_of_workers_that_are_over_is_not_reported() -> None:
    reported: list[Event] = []
    node = Node("a-1", ignored=lambda _, event: reported.append(event))
    node.plan_changed(forming(2, 1))
    assert node.started(1) == [] == node.failed(1, CRASH)
    assert reported == []


def test_a_node_can_leave_in_any_state_and_never_returns() -> None:
    after = {before: {TRANSITIONS[pair] for pair in TRANSITIONS if pair[0] is before} for before in Activity}
    for begin in Activity:
        reached = {begin}
        while new := {to for one in reached for to in after[one] if to is not None} - reached:
            reached |= new
        assert Activity.GONE in reached
        assert begin is not Activity.GONE or reached == {Activity.GONE}


def test_workers_run_only_after_lease_plan_and_bootstrap_store_were_checked() -> None:
    into = {
        (before, event) for (before, event), to in TRANSITIONS.items() if to is Activity.STARTING != before
    }
    assert into == {(Activity.PREPARING, Event.PREPARED)}
    into = {
        (before, event) for (before, event), to in TRANSITIONS.items() if to is Activity.RUNNING != before
    }
    assert into == {(Activity.STARTING, Event.STARTED)}


# -- ready only when no worker runs ---------------------------------------------------------------


@pytest.mark.parametrize("begin", [starting, running])
def test_ready_is_published_only_after_the_workers_are_stopped(begin: Callable[[], Node]) -> None:
    node = begin()
    assert node.plan_changed(forming(2, 3, reason="b lost")) == [StopWorkers(Grace.RESTART, "b lost")]
    assert node.stopped() == [Announce(State.READY, 2)]


def test_a_stopping_node_publishes_nothing_when_another_generation_forms_or_workers_fail() -> None:
    node = stopping()
    assert node.failed(1, CRASH) == [] == node.succeeded(1)
    assert node.plan_changed(forming(3, 4)) == []
    assert node.stopped() == [Announce(State.READY, 3)]


def test_ready_is_published_once_per_generation() -> None:
    node = waiting()
    assert node.plan_changed(forming(1, 2)) == []
    assert node.plan_changed(forming(2, 3)) == [Announce(State.READY, 2)]


def test_a_failed_node_stops_first_and_is_ready_when_the_next_generation_forms() -> None:
    node = running()
    assert node.failed(1, CRASH) == [
        Announce(State.FAILED, 1, CRASH),
        StopWorkers(Grace.RESTART, CRASH.summary),
    ]
    assert node.stopped() == [], "the next generation does not form yet"
    assert node.plan_changed(forming(2, 3)) == [Announce(State.READY, 2)]


def test_after_a_hang_stacks_are_dumped_on_all_nodes() -> None:
    assert running().failed(1, HANG)[-1] == StopWorkers(Grace.RESTART, HANG.summary, dump_stacks=True)
    (stop,) = running().plan_changed(forming(2, 3, failure=HANG))
    assert isinstance(stop, StopWorkers)
    assert stop.dump_stacks


# -- starting ---------------------------------------------------------------------------------------


def test_workers_are_started_only_after_the_prepare_step() -> None:
    node = waiting()
    assert node.prepared(1) == [], "nothing was sealed yet"
    actions = node.plan_changed(sealed(1, 2, "a-1", "b-1"))
    assert [type(action) for action in actions] == [Prepare]
    assert [type(action) for action in node.prepared(1)] == [StartWorkers]
    assert node.prepared(1) == [], "once"


def test_a_node_that_is_not_ready_for_this_generation_does_not_start() -> None:
    assert Node("a-1").plan_changed(sealed(1, 2, "a-1", "b-1")) == []
    assert waiting().plan_changed(sealed(2, 2, "a-1", "b-1")) == []
    assert waiting().plan_changed(sealed(1, 2, "a-2", "b-1")) == [], "the seat of another incarnation"


def test_a_node_without_a_seat_stands_by_and_takes_part_in_the_next() -> None:
    node = waiting()
    assert node.plan_changed(sealed(1, 2, "b-1", "c-1")) == []
    assert node.plan_changed(forming(2, 3)) == [Announce(State.READY, 2)]
    assert node.plan_changed(sealed(2, 4, "a-1", "b-1")) == [Prepare(world(2, "a-1", "b-1"))]


def test_workers_of_a_world_that_has_no_seat_for_this_node_are_stopped_without_grace() -> None:
    node = running()
    (stop,) = node.plan_changed(sealed(2, 3, "b-1", "c-1"))
    assert stop == StopWorkers(Grace.NONE, "generation 2 runs without this node")


def test_a_prepared_start_is_cancelled_when_a_new_generation_forms() -> None:
    node = preparing()
    assert node.plan_changed(forming(2, 3)) == [Announce(State.READY, 2)]
    assert node.prepared(1) == []
    assert node.prepared(2) == []


def test_a_cancelled_start_is_stopped_and_not_reported_as_running() -> None:
    node = starting()
    (stop,) = node.plan_changed(forming(2, 3))
    assert isinstance(stop, StopWorkers)
    assert node.started(1) == []
    assert node.stopped() == [Announce(State.READY, 2)]


def test_a_bootstrap_store_that_cannot_be_reached_is_reported_and_nothing_is_started() -> None:
    node = preparing()
    assert node.prepare_failed(1, UNREACHABLE) == [Announce(State.FAILED, 1, UNREACHABLE)]
    assert node.prepared(1) == []
    assert node.plan_changed(forming(2, 3)) == [Announce(State.READY, 2)]


def test_a_failed_start_is_reported_and_its_workers_are_stopped() -> None:
    node = starting()
    assert node.failed(1, NO_START) == [
        Announce(State.FAILED, 1, NO_START),
        StopWorkers(Grace.RESTART, NO_START.summary),
    ]


# -- what comes late --------------------------------------------------------------------------------


def test_an_older_plan_than_the_newest_is_ignored() -> None:
    node = running()
    assert node.plan_changed(forming(9, 2)) == []
    assert node.plan_changed(forming(9, 1)) == []
    assert node.activity is Activity.RUNNING


def test_late_events_of_an_older_generation_are_ignored() -> None:
    node = stopping()
    node.stopped()
    node.plan_changed(sealed(2, 4, "a-1", "b-1"))
    assert node.prepared(1) == []
    assert node.prepare_failed(1, UNREACHABLE) == []
    node.prepared(2)
    assert node.started(1) == []
    node.started(2)
    assert node.failed(1, CRASH) == []
    assert node.succeeded(1) == []
    assert node.stopped() == [], "nothing was being stopped"
    assert node.activity is Activity.RUNNING


def test_a_node_that_succeeded_is_ready_again_when_a_generation_forms() -> None:
    node = running()
    assert node.succeeded(1) == [Announce(State.SUCCEEDED, 1)]
    assert node.plan_changed(forming(2, 3)) == [Announce(State.READY, 2)]


def test_the_state_is_published_again_in_a_new_store_whose_plans_count_from_1() -> None:
    node = running()
    assert node.store_replaced() == [Announce(State.RUNNING, 1)]
    assert node.plan_changed(sealed(1, 1, "a-1", "b-1")) == []
    assert node.activity is Activity.RUNNING
    (stop,) = node.plan_changed(forming(2, 2))
    assert isinstance(stop, StopWorkers)


# -- the lease --------------------------------------------------------------------------------------


@pytest.mark.parametrize("begin", [starting, running, stopping])
def test_a_lost_lease_stops_without_grace_and_only_then_rejoins(begin: Callable[[], Node]) -> None:
    node = begin()
    assert node.lease_lost("condemned") == [StopWorkers(Grace.NONE, "condemned")]
    assert node.lease_lost("expired") == [], "it counts once"
    assert node.plan_changed(forming(3, 4)) == [], "plans wait until the node has rejoined"
    assert node.stopped() == [Rejoin("condemned")]
    assert node.rejoined("a-2") == []
    assert node.plan_changed(forming(3, 4)) == [Announce(State.READY, 3)]
    assert node.plan_changed(sealed(3, 5, "a-2", "b-1")) == [Prepare(world(3, "a-2", "b-1"))]


def test_a_lease_lost_by_an_idle_node_rejoins_at_once() -> None:
    node = preparing()
    assert node.lease_lost("expired") == [Rejoin("expired")]
    assert node.prepared(1) == []


# -- leaving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lease_is_lost", [False, True])
def test_a_drained_node_publishes_leaving_stops_and_publishes_left(lease_is_lost: bool) -> None:
    node = running()
    assert node.drain("SIGTERM") == [Announce(State.LEAVING, 1), StopWorkers(Grace.DRAIN, "SIGTERM")]
    assert node.plan_changed(forming(2, 3)) == [], "it does not come back"
    if lease_is_lost:
        assert node.lease_lost("expired") == [StopWorkers(Grace.NONE, "expired")]
    assert node.stopped() == [Announce(State.LEFT, 2), Depart(Outcome.DRAINED, "SIGTERM")]
    assert node.plan_changed(forming(3, 4)) == []
    node = stopping()
    assert node.drain("SIGTERM") == []
    assert node.stopped() == [Announce(State.LEFT, 2), Depart(Outcome.DRAINED, "SIGTERM")]


def test_a_drained_node_without_workers_leaves_at_once_and_does_nothing_any_more() -> None:
    node = waiting()
    assert node.drain("SIGTERM") == [Announce(State.LEFT, 1), Depart(Outcome.DRAINED, "SIGTERM")]
    assert node.drain("SIGTERM") == [] == node.lease_lost("expired")
    assert node.plan_changed(sealed(1, 2, "a-1", "b-1")) == []
    assert node.store_replaced() == [] == node.stopped()
    assert node.prepared(1) == []


def test_a_node_that_succeeded_and_is_drained_keeps_its_success() -> None:
    node = running()
    node.succeeded(1)
    assert node.drain("SIGTERM") == [Depart(Outcome.DRAINED, "SIGTERM")]
    assert node.announced.state is State.SUCCEEDED


# -- the end ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "outcome"), [(Phase.FINISHED, Outcome.FINISHED), (Phase.FAILED, Outcome.FAILED)]
)
def test_an_outcome_ends_the_nodes_part_after_its_workers_are_stopped(phase: Phase, outcome: Outcome) -> None:
    node = running()
    assert node.plan_changed(ended(phase, 1, 3)) == [StopWorkers(Grace.NONE, "it is over")]
    assert node.stopped() == [Announce(State.LEFT, 1), Depart(outcome, "it is over")]
    assert node.activity is Activity.GONE


def test_an_outcome_is_acknowledged_at_once_by_a_node_without_workers() -> None:
    node = running()
    node.succeeded(1)
    over = [Announce(State.LEFT, 1), Depart(Outcome.FINISHED, "it is over")]
    assert node.plan_changed(ended(Phase.FINISHED, 1, 3)) == over


def test_a_refused_node_departs_with_the_reason() -> None:
    assert waiting().plan_changed(forming(1, 2, refused={"a-2": Refusal("held")})) == [], "it is not this one"
    refusal = forming(1, 2, refused={"a-1": Refusal("another agent has the id", is_node_id_held=True)})
    assert waiting().plan_changed(refusal)[-1] == Depart(Outcome.NODE_ID_HELD, "another agent has the id")


@pytest.mark.parametrize("lease_is_lost", [False, True])
def test_a_node_with_an_unkillable_worker_publishes_left_and_departs_stuck(lease_is_lost: bool) -> None:
    node = stopping()
    if lease_is_lost:
        node.lease_lost("expired")
    left, gone = node.stopped(unkillable=(71, 72))
    assert left == Announce(State.LEFT, 2)
    assert gone == Depart(Outcome.STUCK, "processes 71, 72 are stuck in the kernel and cannot be killed")


# -- a store that knows less --------------------------------------------------------------------


def test_plans_of_a_coordinator_with_an_older_history_are_ignored() -> None:
    """The store has lost its data, and a node that remembers nothing was elected first."""
    node = running()
    node.plan_changed(forming(2, 3))
    node.stopped()
    node.plan_changed(sealed(2, 4, "a-1", "b-1"))
    node.prepared(2)
    node.started(2)
    assert node.store_replaced() == [Announce(State.RUNNING, 2)]
    for lower in (forming(1, 1), sealed(1, 2, "c-1"), plan(Phase.FINISHED, 1, 3, world=world(1, "c-1"))):
        assert node.plan_changed(lower) == []
    assert node.activity is Activity.RUNNING
    assert [type(one) for one in node.plan_changed(forming(3, 4))] == [StopWorkers]


def test_a_restarted_node_uses_the_history_on_its_disk() -> None:
    known = History(3, world(2, "a-1", "b-1"))
    node = Node("a-2", known)
    assert node.plan_changed(forming(1, 1)) == []
    assert node.plan_changed(forming(2, 2)) == [Announce(State.READY, 2)], "3 may never have been published"
    over = msgspec.structs.replace(known, outcome=Phase.FINISHED, settled=True)
    assert Node("a-2", over).plan_changed(forming(1, 1)) == [Announce(State.READY, 1)], "it is another run"
