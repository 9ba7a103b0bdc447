"""Directed scenarios: every rule holds with the shipped code, and each deliberate bug is detected."""

from __future__ import annotations

import pytest

from .directed import ANOTHER_END, POLICY, Directed
from .mutants import MUTANTS
from .run import story_of
from .scenarios import SCENARIOS

DETECTED = [(name, mutant) for name, scenario in SCENARIOS.items() for mutant in scenario.mutants]


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_rule_is_broken_and_the_run_ends_as_expected(name: str) -> None:
    result = SCENARIOS[name].run(tell=True)
    assert (result.rule, result.end) == (None, SCENARIOS[name].end), f"{result.what}\n{story_of(result)}"


@pytest.mark.parametrize(("name", "mutant"), DETECTED)
def test_a_deliberate_bug_is_detected(name: str, mutant: str) -> None:
    scenario = SCENARIOS[name]
    expected = scenario.mutants[mutant]
    result = scenario.run(mutant, tell=True)
    told = f"{MUTANTS[mutant].what}\n{result.what}\n{story_of(result)}"
    if expected == ANOTHER_END:
        assert result.end != scenario.end, told
    else:
        assert (result.rule or "").startswith(expected), told
        assert result.rule is not None, told


def test_every_deliberate_bug_has_a_scenario() -> None:
    assert {mutant for _, mutant in DETECTED} == set(MUTANTS)


def test_a_lost_coordinators_machine_costs_a_lease_and_a_renewal_at_most() -> None:
    """And no more than the loss of any other machine."""
    recoveries_s = [
        recovery_s(SCENARIOS[name]) for name in ("coordinator's machine is lost", "another machine is lost")
    ]
    of_coordinator_s, of_other_s = recoveries_s
    assert of_coordinator_s < POLICY.lease_ttl_s * (1.0 + 1.0 / 3.0) + POLICY.fence_margin_s + 0.1
    assert of_coordinator_s < of_other_s + 0.1 * POLICY.lease_ttl_s


def recovery_s(scenario: Directed) -> float:
    """Return how long after the fault the next world is sealed, in virtual time."""
    story = scenario.run(tell=True).story
    sealed_s = next(at_s for at_s, who, text in story if who == "store" and ": running(2)" in text)
    return sealed_s - scenario.steps[0].at_s
