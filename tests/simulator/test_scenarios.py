"""Directed scenarios: every rule holds, and the run ends as the scenario says."""

from __future__ import annotations

import pytest

from .directed import POLICY, Directed
from .run import story_of
from .scenarios import SCENARIOS


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_rule_is_broken_and_the_run_ends_as_expected(name: str) -> None:
    result = SCENARIOS[name].run(tell=True)
    assert (result.rule, result.end) == (None, SCENARIOS[name].end), f"{result.what}\n{story_of(result)}"


def test_workers_that_park_are_kept_in_the_next_world_and_others_are_not() -> None:
    kept = {
        name: sum("keeps the workers" in text for _, _, text in SCENARIOS[name].run(tell=True).story)
        for name in ("workers are kept", "workers do not park", "one failure too many")
    }
    assert kept == {"workers are kept": 3, "workers do not park": 2, "one failure too many": 0}


def test_a_lost_coordinators_machine_costs_a_lease_and_a_renewal_at_most() -> None:
    """And no more than the loss of any other machine."""
    of_coordinator_s, of_other_s = (
        recovery_s(SCENARIOS[name]) for name in ("coordinator's machine is lost", "another machine is lost")
    )
    assert of_coordinator_s < POLICY.lease_ttl_s * (1.0 + 1.0 / 3.0) + POLICY.fence_margin_s + 0.1
    assert of_coordinator_s < of_other_s + 0.1 * POLICY.lease_ttl_s


def recovery_s(scenario: Directed) -> float:
    """Return how long after the fault the next world is sealed, in virtual time."""
    story = scenario.run(tell=True).story
    sealed_s = next(at_s for at_s, who, text in story if who == "store" and ": running(2)" in text)
    return sealed_s - scenario.steps[0].at_s
