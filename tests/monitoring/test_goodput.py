"""How a node's time is divided into training and the rest."""

from __future__ import annotations

from elastic_agent.monitoring.goodput import Account, Goodput
from elastic_agent.monitoring.status_text import goodput_text


def test_the_time_in_which_workers_run_is_training() -> None:
    account = Account(0)
    assert account.goodput(5) == Goodput(0, 5)
    account.workers_started(5)
    assert account.goodput(20) == Goodput(15, 5)
    account.workers_ended(30)
    account.workers_ended(31)
    account.workers_started(40)
    account.workers_ended(60)
    assert account.goodput(65) == Goodput(45, 20)


def test_workers_that_report_steps_train_from_their_first_step_on() -> None:
    account = Account(0)
    account.workers_started(0)
    assert account.goodput(20) == Goodput(20, 0), "it is not known yet that they report steps"
    account.step(30)
    account.step(31)
    assert account.goodput(100) == Goodput(70, 30)
    account.workers_ended(100)
    account.workers_started(110)
    assert account.goodput(120) == Goodput(70, 50)
    account.step(125)
    account.workers_ended(130)
    assert account.goodput(130) == Goodput(75, 55)
    account.workers_started(130)
    account.workers_ended(140)
    assert account.goodput(140) == Goodput(75, 65), "they ended before their first step"


def test_the_time_of_workers_that_did_not_train_does_not_count() -> None:
    account = Account(0)
    account.workers_started(0)
    account.workers_ended(10, trained=False)
    assert account.goodput(10) == Goodput(0, 10)


def test_the_line_at_the_end_of_a_run() -> None:
    assert goodput_text(Goodput(7320, 540)) == "goodput 93 % over 2 h 11 min: training 2 h 2 min"
    assert goodput_text(Goodput(0, 3)) == "goodput 0 % over 3 s"
    assert goodput_text(Goodput(0, 0.04)) == "goodput 0 % over 0 s"
