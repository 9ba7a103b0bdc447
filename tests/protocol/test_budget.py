"""The restart budget: what is forgiven, which failures end a run early, and how long a crash loop pauses."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from elastic_agent.protocol.cluster_view import PROGRESS_S
from elastic_agent.protocol.records import Failure, FailureKind, Phase, State
from tests.protocol.support import (
    CRASH,
    HANG,
    NO_START,
    STEP_S,
    Table,
    policy,
    running,
    settled,
)
from tests.protocol.test_notices import stop

FORMING, RUNNING, FAILED = Phase.FORMING, Phase.RUNNING, Phase.FAILED
WINDOW_S = 120.0
RULES = policy(restart_window_s=WINDOW_S)

TYPO = Failure(FailureKind.WORKER, "worker a/0 exited with code 1: NameError: x", signature="e1")
OTHER = Failure(FailureKind.WORKER, "worker b/0 exited with code 1: KeyError: 'y'", signature="e2")


def fail(table: Table, node: str = "a", failure: Failure = CRASH) -> None:
    """This node fails, and all nodes stop."""
    table.says(node, State.FAILED, failure=failure)
    table.all_say(State.READY, *table.newest)


def run_again(table: Table) -> None:
    """Wait until the next world is sealed, and have all nodes start."""
    for _ in range(1000):
        if table.plan.phase is RUNNING:
            break
        table.wait(STEP_S)
    table.all_say(State.RUNNING, *table.world)


def fail_and_restart(table: Table, failure: Failure = CRASH) -> None:
    fail(table, failure=failure)
    run_again(table)


def spent(table: Table) -> int:
    """Return how many failures count against the budget, by what the plan says."""
    return table.plan.charged - table.plan.budget.forgiven


# -- forgiving --------------------------------------------------------------------------------------


def test_one_failure_is_forgiven_per_window_of_progress() -> None:
    table = running("a", "b", rules=RULES)
    for _ in range(3):
        fail_and_restart(table)
    assert spent(table) == 3
    table.wait(2 * WINDOW_S + 1.0)
    fail_and_restart(table)
    assert (table.stand, table.plan.charged, spent(table)) == ((RUNNING, 5), 4, 2)
    assert "restart 2 of 3, 2 earlier ones forgiven" in table.plan.reason


def pause(table: Table) -> None:
    table.wait(PROGRESS_S)
    table.now_s += WINDOW_S
    table.coordinator.stood_still(table.now_s, WINDOW_S)
    table.wait(STEP_S)


def change_often(table: Table) -> None:
    for _ in range(6):
        table.wait(PROGRESS_S / 4)
        table.change_coordinator()
    table.wait(STEP_S)


NO_PROGRESS: dict[str, tuple[float, Callable[[Table], None], Callable[[Table], None]]] = {
    "before the first failure": (WINDOW_S, lambda table: table.wait(5 * WINDOW_S), lambda table: None),
    "turned off": (0.0, lambda table: None, lambda table: table.wait(5 * WINDOW_S)),
    "a pause of the coordinator": (WINDOW_S, lambda table: None, pause),
    "a change of coordinator": (WINDOW_S, lambda table: None, change_often),
}


def test_time_without_the_whole_world_does_not_count_as_progress() -> None:
    table = running("a", "b", rules=policy(restart_window_s=10.0, max_restarts=1, start_timeout_s=1000.0))
    fail(table)
    table.wait(1.0)
    table.says("a", State.RUNNING)
    table.wait(50.0)  # b still starts
    fail(table)
    assert table.plan.phase is FAILED


@pytest.mark.parametrize(("window_s", "before", "after"), NO_PROGRESS.values(), ids=NO_PROGRESS)
def test_what_does_not_count_as_progress(
    window_s: float, before: Callable[[Table], None], after: Callable[[Table], None]
) -> None:
    table = running("a", "b", rules=policy(restart_window_s=window_s, max_restarts=1))
    before(table)
    fail_and_restart(table)
    after(table)
    fail(table)
    assert table.plan.budget.forgiven == 0
    assert table.plan.reason == f"{CRASH.summary}; the only restart is used"


def test_generations_that_end_early_make_no_progress_unless_their_workers_report_some() -> None:
    beaten = msgspec.structs.replace(CRASH, progressed=True)
    for failure, forgiven in ((CRASH, 0), (beaten, 3)):
        table = running("a", "b", rules=policy(max_restarts=100, restart_window_s=WINDOW_S))
        fail_and_restart(table)
        for _ in range(12):
            table.wait(PROGRESS_S / 2)
            fail_and_restart(table, failure)
        assert table.plan.budget.forgiven == forgiven


def test_the_time_of_a_hang_does_not_count_as_progress() -> None:
    stalled = msgspec.structs.replace(HANG, progressed=True, stalled_s=WINDOW_S)
    for failure, phase in ((CRASH, RUNNING), (stalled, FAILED)):
        table = running("a", "b", rules=policy(restart_window_s=WINDOW_S, max_restarts=1))
        fail_and_restart(table)
        table.wait(WINDOW_S + PROGRESS_S)
        fail(table, failure=failure)
        assert table.plan.phase is phase


@pytest.mark.parametrize("parts", [1, 3, 11])
def test_progress_survives_a_change_of_coordinator(parts: int) -> None:
    table = running("a", "b", rules=policy(restart_window_s=WINDOW_S, max_restarts=1))
    fail_and_restart(table)
    for _ in range(parts):
        table.wait(1.2 * WINDOW_S / parts + PROGRESS_S)
        table.change_coordinator()
    table.wait(STEP_S)
    fail(table)
    assert table.plan.phase is RUNNING
    assert table.plan.budget.forgiven == 1


def test_of_equally_new_histories_the_one_with_more_progress_counts() -> None:
    table = running("a", "b", rules=RULES)
    fail_and_restart(table)
    early = table.plan
    table.wait(WINDOW_S)
    late = table.plan
    assert late.budget.progress_s > early.budget.progress_s
    for own, told in ((early, late), (late, early)):
        again = Table(RULES, remembered=own)
        again.comes("a", state=State.RUNNING, generation=2, history=told)
        again.comes("b", state=State.RUNNING, generation=2)
        assert again.plan.budget == late.budget


def test_a_resumed_run_has_its_remaining_budget() -> None:
    table = running("a", "b", rules=RULES)
    for _ in range(2):
        fail_and_restart(table)
    table.wait(WINDOW_S + 1.0)
    table.says("a", State.RUNNING, stop_request=stop())
    table.all_say(State.SAVED, "a", "b")
    assert table.plan.phase is Phase.STOPPED
    again = Table(RULES, remembered=settled(table.plan))
    again.comes("a", generation=0)
    assert (again.plan.phase, again.plan.charged) == (FORMING, 2)
    assert again.plan.budget.progress_s == pytest.approx(WINDOW_S + 1.0, abs=2 * STEP_S)


# -- the same failure again -------------------------------------------------------------------------


def test_a_failure_that_repeats_before_any_progress_ends_the_run_after_one_retry() -> None:
    table = running("a", "b", rules=policy(max_restarts=100))
    fail_and_restart(table, TYPO)
    elsewhere = msgspec.structs.replace(TYPO, summary="worker b/1 exited with code 1: NameError: x")
    fail(table, "b", elsewhere)
    assert table.stand == (FAILED, 3)
    assert table.plan.reason == (
        "the same failure repeated without progress: worker b/1 exited with code 1: NameError: x; "
        "remove the cause, then start the run again"
    )
    assert table.plan.charged == 1


def test_advice_is_kept_when_a_long_failure_is_shortened() -> None:
    table = running("a", "b")
    wordy = msgspec.structs.replace(TYPO, summary="x" * 512)
    fail_and_restart(table, wordy)
    fail(table, failure=wordy)
    assert len(table.plan.reason) == 512
    assert table.plan.reason.endswith("…; remove the cause, then start the run again")


@pytest.mark.parametrize("failures", [(TYPO, OTHER, TYPO), (CRASH, CRASH, CRASH), (TYPO, CRASH, TYPO)])
def test_different_or_incomparable_failures_use_the_budget(
    failures: tuple[Failure, ...],
) -> None:
    table = running("a", "b")
    for failure in failures:
        fail_and_restart(table, failure)
    assert table.plan.charged == 3
    fail(table, failure=TYPO if failures[-1] is not TYPO else OTHER)
    assert table.plan.reason.endswith("; all 3 restarts are used")


@pytest.mark.parametrize("heartbeat", [False, True])
def test_a_failure_repeated_after_progress_or_a_heartbeat_uses_the_budget(heartbeat: bool) -> None:
    table = running("a", "b")
    for _ in range(3):
        fail_and_restart(table, msgspec.structs.replace(TYPO, progressed=heartbeat))
        table.wait(0.0 if heartbeat else PROGRESS_S)
    assert table.plan.charged == 3


@pytest.mark.parametrize("most", [0, 1])
def test_with_at_most_one_restart_the_reason_names_the_budget(most: int) -> None:
    table = running("a", "b", rules=policy(max_restarts=most))
    for _ in range(most):
        fail_and_restart(table, TYPO)
    fail(table, failure=TYPO)
    words = ("no restarts are allowed", "the only restart is used")[most]
    assert table.plan.reason == f"{TYPO.summary}; {words}"


# -- the pause --------------------------------------------------------------------------------------


def pauses(table: Table, times: int, failure: Failure = CRASH) -> list[float]:
    """From each failure to the next world."""
    found = []
    for _ in range(times):
        failed_s = table.now_s
        fail_and_restart(table, failure)
        found.append(table.now_s - failed_s)
    return found


def test_restarts_in_a_crash_loop_are_delayed_increasingly_except_the_first() -> None:
    table = running("a", "b", rules=policy(max_restarts=100, restart_window_s=0.0))
    assert pauses(table, 9) == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    table.wait(PROGRESS_S)
    assert pauses(table, 2) == [0.0, 1.0]
    assert pauses(table, 3, msgspec.structs.replace(CRASH, progressed=True)) == [0.0] * 3, (
        "a heartbeat ends it"
    )
    assert pauses(running("a", "b", rules=policy(max_restarts=100)), 4, NO_START) == [0.0, 0.0, 1.0, 2.0]


def test_the_reason_names_the_length_of_the_pause() -> None:
    table = running("a", "b", rules=policy(max_restarts=100))
    pauses(table, 3)
    fail(table)
    assert table.plan.reason == f"{CRASH.summary}; restarting in 4 s"
    assert table.last.reason == "restarting in 4 s, after 4 failures in a row without progress"
    assert table.last.wake_s <= table.now_s + 4.0


def test_a_lost_node_or_a_stop_request_during_the_pause_ends_it() -> None:
    table = running("a", "b", "c", rules=policy(max_restarts=100))
    pauses(table, 6)
    fail(table)
    table.wait(2.0)
    assert table.plan.phase is FORMING
    table.says("c", State.LEAVING)
    table.says("c", State.LEFT)
    assert (table.plan.phase, table.world, table.plan.charged) == (RUNNING, ["a", "b"], 6)
    table.all_say(State.RUNNING, "a", "b")
    table.says("a", State.FAILED, failure=CRASH)
    assert table.plan.phase is FORMING
    table.says("a", State.READY, stop_request=stop())
    assert table.plan.phase is Phase.STOPPED


def test_membership_changes_do_not_wait_for_a_crash_loop() -> None:
    table = running("a", "b", rules=policy(max_restarts=100))
    pauses(table, 6)
    table.comes("c")
    table.wait(2.0)
    assert table.plan.reason == "c joined"
    table.all_say(State.READY, "a", "b", "c")
    assert table.world == ["a", "b", "c"]


# -- a rule that holds throughout -------------------------------------------------------------------


def test_progress_is_written_only_while_failures_can_be_forgiven() -> None:
    table = running("a", "b", rules=RULES)
    fail_and_restart(table)
    known = len(table.plans)
    table.wait(5 * WINDOW_S)
    assert len(table.plans) - known <= 11
    assert table.plan.budget.progress_s == WINDOW_S
