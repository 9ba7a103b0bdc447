"""The protocol under simulated faults: every safety rule after every step, liveness once the faults stop."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .run import run_seed, story_of
from .scenario import ETCD, FAULTS, PAIRS, pair_of

SEEDS, MORE_SEEDS = 60, 300
"""How many `make test` runs, and how many `make prove`."""
SLICE = 10
PAIR_SEEDS, PAIR_SLICE = 200, 50
SLICES = [
    *range(0, SEEDS, SLICE),
    *(pytest.param(first, marks=pytest.mark.prove) for first in range(SEEDS, MORE_SEEDS, SLICE)),
]


def story(seed: int) -> str:
    """Return what to read when a seed fails, and how to see it again."""
    told = run_seed(seed, tell=True)
    return f"{told.what}\n{story_of(told)}\nreplay: python -m tests.simulator --seed {seed} --story"


@pytest.mark.parametrize("first", SLICES)
def test_every_rule_holds_for_every_seed(first: int) -> None:
    for seed in range(first, first + SLICE):
        if run_seed(seed).rule is not None:
            pytest.fail(story(seed))


def test_every_pair_of_faults_occurs_in_turn() -> None:
    drawn = [pair_of(seed) for seed in range(len(PAIRS))]
    assert len(set(drawn)) == len(PAIRS)
    for kind in {*FAULTS, *ETCD}:
        assert any(kind in draw.focus for draw in drawn), kind


@pytest.mark.prove
@pytest.mark.parametrize("first", range(0, PAIR_SEEDS, PAIR_SLICE))
def test_every_rule_holds_for_pairs_of_fault_kinds(first: int) -> None:
    for seed in range(first, first + PAIR_SLICE):
        draw = pair_of(seed)
        result = run_seed(seed, draw)
        if result.rule is not None:
            told = run_seed(seed, draw, tell=True)
            replay = f"python -m tests.simulator --seed {seed} --story --pairs"
            pytest.fail(f"{draw}: {told.what}\n{story_of(told)}\nreplay: {replay}")


@pytest.mark.parametrize("seed", [8, 9], ids=["etcd", "c10d"])
def test_a_seed_is_replayed_exactly(seed: int) -> None:
    first, second = (run_seed(seed, tell=True) for _ in range(2))
    assert first == second


REPLAYED = {"etcd": 8, "c10d": 9}
TELL_STORIES = """
import sys
from tests.simulator.__main__ import main

for seed in sys.argv[1:]:
    sys.argv = ["tests.simulator", "--seed", seed, "--story"]
    assert main() == 0
    print("end of the story")
"""


@pytest.fixture(scope="module")
def replays() -> list[list[str]]:
    """The stories that two processes with different hash seeds tell of the replayed seeds."""
    seeds = [str(seed) for seed in REPLAYED.values()]
    told = [
        subprocess.run(
            [sys.executable, "-c", TELL_STORIES, *seeds],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    return [stories.split("end of the story\n") for stories in told]


@pytest.mark.prove
@pytest.mark.parametrize("hosting", REPLAYED)
def test_a_seed_is_replayed_exactly_whatever_the_hash_seed(replays: list[list[str]], hosting: str) -> None:
    """The story that another process tells of the same seed is the same, to the last letter."""
    first, second = (stories[list(REPLAYED).index(hosting)] for stories in replays)
    assert first == second
    assert len(first.splitlines()) > 20
