"""What the time of a node was spent on: training that was lost counts as repeated, not as training."""

from __future__ import annotations

import pytest

from elastic_agent.diagnosis.records import Activity, Goodput
from elastic_agent.monitoring.goodput import MOST_MARKS, Account
from elastic_agent.monitoring.status_text import goodput_text


def started(account: Account, at_s: float) -> None:
    """The account of a node whose workers run after 10 s of forming and 5 s of starting."""
    account.switch(Activity.FORMING, at_s)
    account.switch(Activity.STARTING, at_s + 10)
    account.workers_started(at_s + 15)


def steps(account: Account, first: int, last: int, at_s: float) -> float:
    """One step per second; returns when the last one was made."""
    for step in range(first, last + 1):
        account.step(step, at_s + step - first)
    return at_s + last - first


def crash(account: Account, at_s: float) -> None:
    account.workers_ended(Activity.STOPPING, at_s, saved=False)


def test_the_time_until_the_first_step_is_spent_on_starting() -> None:
    account = Account(0)
    started(account, 0)
    assert account.goodput(20).training_s == 5, "it is not known yet that the workers report steps"
    steps(account, 1, 11, 35)
    assert account.goodput(45) == Goodput(
        waiting_s=0, forming_s=10, starting_s=25, training_s=10, knows_steps=True
    )


def test_after_a_crash_the_time_since_the_step_of_the_checkpoint_is_repeated() -> None:
    account = Account(0)
    started(account, 0)
    end_s = steps(account, 1, 101, 15)
    crash(account, end_s)
    started(account, end_s)
    steps(account, 81, 101, end_s + 20)
    found = account.goodput(end_s + 40)
    assert (found.training_s, found.repeated_s) == (100, 20), "80 s to step 81, 20 s again to step 101"
    assert (found.forming_s, found.starting_s) == (20, 5 + 10)
    assert found.total_s == end_s + 40


def test_steps_that_are_lost_twice_are_repeated_twice() -> None:
    account = Account(0)
    account.workers_started(0)
    crash(account, steps(account, 1, 101, 0))
    account.workers_started(100)
    crash(account, steps(account, 51, 61, 100))
    account.workers_started(110)
    steps(account, 51, 52, 110)
    found = account.goodput(111)
    assert (found.training_s, found.repeated_s) == (51, 60)


def test_nothing_is_lost_if_the_workers_saved_before_they_left() -> None:
    account = Account(0)
    account.workers_started(0)
    end_s = steps(account, 1, 50, 0) + 3
    account.workers_ended(Activity.FORMING, end_s, saved=True)
    account.workers_started(end_s + 1)
    account.step(51, end_s + 2)
    found = account.goodput(end_s + 2)
    assert (found.training_s, found.repeated_s) == (52, 0)


def test_a_hang_is_not_training_even_if_no_step_is_lost() -> None:
    account = Account(0)
    account.workers_started(0)
    crash(account, steps(account, 1, 50, 0) + 1800)
    account.last_step(50)
    account.workers_started(2000)
    account.step(51, 2000)
    found = account.goodput(2000)
    assert (found.training_s, found.repeated_s) == (49, 1800)


def test_a_hang_is_not_training_even_if_the_workers_report_no_steps() -> None:
    account = Account(0)
    account.workers_started(0)
    account.workers_ended(Activity.FORMING, 1900, saved=False, stalled_since_s=100)
    account.workers_started(1900)
    found = account.goodput(2000)
    assert (found.training_s, found.repeated_s) == (200, 1800)


def test_steps_between_two_looks_are_interpolated_and_the_last_one_may_be_known_late() -> None:
    account = Account(0)
    account.workers_started(0)
    account.step(1, 0)
    account.step(100, 99)
    crash(account, 120)
    account.workers_started(120)
    account.last_step(121)
    account.step(51, 120)
    found = account.goodput(120)
    assert (found.training_s, found.repeated_s) == (pytest.approx(50), pytest.approx(70))


def test_the_account_of_a_long_run_stays_small() -> None:
    account = Account(0)
    account.workers_started(0)
    steps(account, 1, 20 * MOST_MARKS, 0)
    saved = account.saved(20 * MOST_MARKS, 0)
    assert len(saved.marks) <= MOST_MARKS
    assert saved.marks[-1][0] == 20 * MOST_MARKS


def test_forming_with_too_few_nodes_is_waiting() -> None:
    account = Account(0)
    account.switch(Activity.FORMING, 0)
    account.misses_nodes(2)
    account.misses_nodes(60)
    account.switch(Activity.FORMING, 60)
    assert account.goodput(61) == Goodput(waiting_s=60, forming_s=1)


@pytest.mark.parametrize(("outcome", "down_s"), [("", 100), ("stopped", 0)], ids=["killed", "stopped"])
def test_the_account_continues_when_the_agent_is_started_again(outcome: str, down_s: float) -> None:
    first = Account(0)
    first.workers_started(0)
    steps(first, 1, 101, 0)
    saved = first.saved(100, 5000, outcome)

    second = Account(7)
    second.take_over(saved, 5100)
    second.workers_started(17)
    second.step(91, 17)
    expected = Goodput(training_s=90, repeated_s=10, waiting_s=10, down_s=down_s, knows_steps=True)
    assert second.goodput(17) == expected


def test_an_account_that_is_read_late_is_added() -> None:
    first = Account(0)
    first.workers_started(0)
    steps(first, 1, 101, 0)
    saved = first.saved(100, 5000, "stopped")

    second = Account(0)
    second.workers_started(0)
    steps(second, 102, 112, 0)
    second.take_over(saved, 5000)
    crash(second, 10)
    second.workers_started(10)
    second.step(107, 10)
    found = second.goodput(10)
    assert (found.training_s, found.repeated_s) == (105, 5)


def test_the_line_at_the_end_of_a_run() -> None:
    goodput = Goodput(
        training_s=7320,
        repeated_s=180,
        starting_s=240,
        forming_s=12,
        waiting_s=120,
        stopping_s=0.01,
        knows_steps=True,
    )
    assert goodput_text(goodput) == (
        "goodput 93 % over 2 h 11 min: training 2 h 2 min, repeated 3 min, starting 4 min, forming 12 s, "
        "waiting 2 min"
    )
    assert goodput_text(Goodput(training_s=90, waiting_s=10)) == (
        "goodput at most 90 % over 1 min 40 s: training 1 min 30 s, waiting 10 s (repeated steps are not known, "
        "as the workers report no steps)"
    )
    assert goodput_text(Goodput(waiting_s=3)) == "goodput 0 % over 3 s: waiting 3 s"
    assert goodput_text(Goodput(waiting_s=0.04)) == "goodput 0 % over 0 s"
