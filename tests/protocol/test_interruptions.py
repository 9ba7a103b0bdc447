"""Workers that were ended by a signal which asks their agent to stop as well: no failure, and no success."""

from __future__ import annotations

import pytest

from elastic_agent.protocol.records import Failure, FailureKind, Phase, State
from elastic_agent.protocol.running import EXPLAIN_S
from tests.protocol.support import CRASH, STEP_S, Table, running
from tests.protocol.test_notices import asks, handling_notices, leave, stop

FORMING, RUNNING, STOPPED = Phase.FORMING, Phase.RUNNING, Phase.STOPPED
SIGNAL = Failure(
    FailureKind.INTERRUPTED, "worker a/0 was terminated by SIGTERM, which the agent also received"
)


def interrupted(table: Table, node: str, state: State = State.SAVED) -> None:
    table.says(node, state, failure=SIGNAL)


def test_others_may_save_until_the_meaning_of_the_signal_is_known() -> None:
    table = handling_notices("a", "b", "c")
    interrupted(table, "a")
    table.wait(EXPLAIN_S - STEP_S)
    assert table.stand == (RUNNING, 1)
    asks(table, "b", stop())
    assert table.stand == (RUNNING, 1), "b and c still save"
    table.all_say(State.SAVED, "b", "c")
    assert table.stand == (STOPPED, 1)


def test_a_run_whose_workers_exit_on_the_stop_signal_is_stopped_not_finished() -> None:
    table = running("a", "b")
    interrupted(table, "a")
    interrupted(table, "b")
    assert table.stand == (RUNNING, 1)
    asks(table, "a", stop())
    assert (table.stand, table.plan.charged) == ((STOPPED, 1), 0)


def test_without_a_stop_request_interrupted_workers_are_restarted_uncharged() -> None:
    table = handling_notices("a", "b")
    interrupted(table, "a", State.RUNNING)
    table.wait(EXPLAIN_S - STEP_S)
    interrupted(table, "a")
    assert table.stand == (RUNNING, 1)
    table.wait(STEP_S)
    assert (table.stand, table.plan.reason) == ((FORMING, 2), "a signal terminated workers of a")
    table.all_say(State.READY, "a", "b")
    assert (table.stand, table.plan.charged) == ((RUNNING, 2), 0)


@pytest.mark.parametrize("state", [State.RUNNING, State.SAVED])
def test_failures_elsewhere_caused_by_interrupted_workers_are_not_charged(state: State) -> None:
    table = handling_notices("a", "b")
    interrupted(table, "a", state)
    for generation, charged in ((2, 0), (3, 1)):  # the next one is charged again
        table.says("b", State.FAILED, failure=CRASH)
        assert table.stand == (FORMING, generation)
        table.all_say(State.READY, "a", "b")
        assert (table.stand, table.plan.charged) == ((RUNNING, generation), charged)
        table.all_say(State.RUNNING, "a", "b")


def test_the_others_continue_after_a_node_leaves_by_the_signal() -> None:
    table = handling_notices("a", "b", "c")
    interrupted(table, "b")
    asks(table, "b", leave("b"))
    table.all_say(State.SAVED, "a", "c")
    table.all_say(State.READY, "a", "c")
    table.says("b", State.LEFT)
    assert (table.stand, table.world, table.plan.charged) == ((RUNNING, 2), ["a", "c"], 0)
