"""Speeds in the status."""

from __future__ import annotations

import pytest

from elastic_agent.diagnosis.records import NodeReport, WorkerReport, WorkerState
from elastic_agent.monitoring.rates import StepRate, find_stragglers


def test_steps_per_second_are_those_of_the_last_seconds() -> None:
    rate = StepRate()
    rate.see(1, 0, 0.0)
    rate.see(1, 100, 10.0)
    assert rate.per_s is None, "the first step tells nothing about the speed"
    rate.see(1, 110, 11.0)
    assert rate.per_s is None, "too early"
    rate.see(1, 150, 15.0)
    assert rate.per_s == 10.0
    rate.see(1, 150, 20.0)
    assert rate.per_s == 0.0
    rate.see(2, 140, 21.0)
    assert rate.per_s is None, "another generation continues at an earlier step"


def node(number: int, *waits: float | None) -> NodeReport:
    workers = tuple(
        WorkerReport(slot, 2 * number + slot, WorkerState.RUNNING, waits=one)
        for slot, one in enumerate(waits)
    )
    return NodeReport(f"n{number}", f"i{number}", 1, 0.0, workers=workers)


def test_the_worker_that_never_waits_while_the_others_do_is_late() -> None:
    (line,) = find_stragglers([node(0, 0.45, 0.5), node(1, 0.48, 0.02)])
    assert line == (
        "worker n1/1 (rank 3) is slower than the others: they wait in collectives for "
        "46 % of the time while it does not"
    )


@pytest.mark.parametrize(
    "reports",
    [
        [node(0, 0.3, 0.35), node(1, 0.28, 0.2)],
        [node(0, 0.0, 0.0), node(1, 0.0, 0.6)],
        [node(0, None, None), node(1, 0.1)],
        [],
    ],
    ids=["alike", "only one waits", "hardly known", "nothing"],
)
def test_differences_that_have_other_reasons_are_not_blamed_on_a_worker(reports: list[NodeReport]) -> None:
    assert find_stragglers(reports) == ()
