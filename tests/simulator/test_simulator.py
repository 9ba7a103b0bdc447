"""The protocol under simulated faults: every safety rule after every step, liveness once the faults stop."""

from __future__ import annotations

import os

import pytest

from .mutants import MUTANTS, Mutant
from .run import Result, run_seed, run_seeds, story_of

SEEDS = 2000

SUBTLE = {
    "deadline-from-last-attempt",
    "deadline-from-reply",
    "history-tie",
    "remembers-after-publishing",
    "renews-condemned",
    "time-before-the-read",
}
"""Deliberate bugs that need a rare coincidence, and so thousands of universes, to show. Not part of the suite:
``python -m tests.simulator --mutant NAME --seeds 4000``."""


def story(seed: int, mutant: Mutant | None = None) -> str:
    """What to read when a seed fails, and how to see it again."""
    told = run_seed(seed, mutant, tell=True)
    return f"{told.what}\n{story_of(told)}\nreplay: python -m tests.simulator --seed {seed} --story"


@pytest.mark.timeout(900)
def test_every_rule_holds_in_every_universe() -> None:
    broken: list[Result] = []
    verdicts: set[str] = set()
    for result in run_seeds(range(SEEDS), jobs=os.cpu_count() or 1):
        verdicts.add(result.verdict)
        if result.rule is not None:
            broken.append(result)
            break
    assert not broken, story(broken[0].seed)
    assert {"finished", "failed"} <= verdicts, "the universes are too tame"


def test_a_seed_is_replayed_exactly() -> None:
    first, again = run_seed(7, tell=True), run_seed(7, tell=True)
    assert first == again
    assert len(first.story) > 20


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(set(MUTANTS) - SUBTLE))
def test_the_checker_catches_a_deliberate_bug(name: str) -> None:
    mutant = MUTANTS[name]
    caught = next((seed for seed in range(mutant.seeds) if run_seed(seed, mutant).rule is not None), None)
    assert caught is not None, f"{mutant.what}: not caught within {mutant.seeds} seeds"
