"""What the status tells about speeds and ages."""

from __future__ import annotations

import pytest

from elastic_agent.diagnosis.records import Goodput, NodeReport, WorkerReport, WorkerState
from elastic_agent.monitoring.goodput import sum_goodput
from elastic_agent.monitoring.rates import LeaseAges, StepRate, find_stragglers
from elastic_agent.monitoring.status_text import run_goodput_text
from elastic_agent.protocol import Lease


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


def test_the_age_of_a_lease_is_known_once_it_was_renewed() -> None:
    ages = LeaseAges()
    ages.see({"a": Lease("a", 5.0, beat=7), "b": Lease("b", 5.0, beat=3)}, 100.0)
    assert ages.ages_s(100.0) == {}
    ages.see({"a": Lease("a", 5.0, beat=8), "b": Lease("b", 5.0, beat=3)}, 102.0)
    assert ages.ages_s(103.5) == {"a": 1.5}
    ages.see({"b": Lease("b", 5.0, beat=4)}, 110.0)
    assert ages.ages_s(110.0) == {"b": 0.0}, "a has gone"


def test_the_goodput_of_a_run_is_that_of_all_its_nodes() -> None:
    first, second = Goodput(90.0, 10.0), Goodput(60.0)
    whole = sum_goodput({"n0": first, "n1": second}, {"n0", "n1"})
    assert whole is not None
    assert run_goodput_text(whole) == (
        "all 2 nodes, times added up: goodput 94 % over 2 min 40 s: training 2 min 30 s"
    )
    assert sum_goodput({}) is None


def node(number: int, *waits: float | None) -> NodeReport:
    workers = tuple(
        WorkerReport(slot, 2 * number + slot, WorkerState.RUNNING, waits=one)
        for slot, one in enumerate(waits)
    )
    return NodeReport(f"n{number}", f"i{number}", 1, 0.0, workers=workers)


def test_the_worker_that_never_waits_while_the_others_do_is_late() -> None:
    (late,) = find_stragglers([node(0, 0.45, 0.5), node(1, 0.48, 0.02)])
    assert (late.node_id, late.slot, late.rank) == ("n1", 1, 3)
    assert late.words == (
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
