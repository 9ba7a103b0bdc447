"""The protocol under simulated faults: every safety rule after every step, liveness once the faults stop."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .pairs import PAIRS, pair_of
from .run import run_seed, story_of
from .scenario import ETCD, FAULTS

SEEDS = 500
PAIR_SEEDS = 300
SLICE = 100


def story(seed: int) -> str:
    """What to read when a seed fails, and how to see it again."""
    told = run_seed(seed, tell=True)
    return f"{told.what}\n{story_of(told)}\nreplay: python -m tests.simulator --seed {seed} --story"


@pytest.mark.parametrize("first", range(0, SEEDS, SLICE))
def test_every_rule_holds_for_every_seed(first: int) -> None:
    verdicts: set[str] = set()
    for seed in range(first, first + SLICE):
        result = run_seed(seed)
        verdicts.add(result.verdict)
        if result.rule is not None:
            pytest.fail(story(seed))
    assert {"finished", "failed"} <= verdicts, "the universes are too tame"


def test_every_pair_of_faults_occurs_in_turn() -> None:
    drawn = [pair_of(seed) for seed in range(len(PAIRS))]
    assert len(set(drawn)) == len(PAIRS)
    for kind in {*FAULTS, *ETCD}:
        assert any(kind in one.focus for one in drawn), kind


@pytest.mark.parametrize("first", range(0, PAIR_SEEDS, SLICE))
def test_every_rule_holds_for_pairs_of_fault_kinds(first: int) -> None:
    for seed in range(first, first + SLICE):
        draw = pair_of(seed)
        result = run_seed(seed, None, draw)
        if result.rule is not None:
            told = run_seed(seed, None, draw, tell=True)
            replay = f"python -m tests.simulator --seed {seed} --story --pairs"
            pytest.fail(f"{draw}: {told.what}\n{story_of(told)}\nreplay: {replay}")


@pytest.mark.parametrize("seed", [8, 9], ids=["etcd", "c10d"])
def test_a_seed_is_replayed_exactly_whatever_the_hash_seed(seed: int) -> None:
    """The story that another process tells of the same seed is the same, to the last letter."""
    stories = [
        subprocess.run(
            [sys.executable, "-m", "tests.simulator", "--seed", str(seed), "--story"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert stories[0] == stories[1]
    assert len(stories[0].splitlines()) > 20
