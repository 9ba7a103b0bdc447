"""Which samples a Trainer uses after it has resumed; in one process, because importing transformers takes seconds."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.client.support import AGENT_ENVIRONMENT, run_script

SCRIPT = Path(__file__).parent / "transformers_resuming.py"
EPOCH = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    alone = {name: value for name, value in AGENT_ENVIRONMENT.items() if name.startswith("ELASTIC_AGENT_")}
    folder = tmp_path_factory.mktemp("trainings")
    return run_script(SCRIPT, {**alone, "TORCHELASTIC_RUN_ID": "digits"}, cwd=folder)


def steps(trainings: subprocess.CompletedProcess[str], number: int) -> list[list[int]]:
    lines = [line for line in trainings.stdout.splitlines() if line.startswith("steps ")]
    used: list[list[int]] = json.loads(lines[number].removeprefix("steps "))
    return used


@pytest.mark.prove
def test_a_callback_may_request_the_loader_during_training(
    trainings: subprocess.CompletedProcess[str],
) -> None:
    assert steps(trainings, 1) == EPOCH[:4]
    assert steps(trainings, 2) == [*EPOCH[4:], *EPOCH]


def test_a_checkpoint_that_was_saved_without_elastic_agent_is_resumed_where_it_is_in_the_epoch(
    trainings: subprocess.CompletedProcess[str],
) -> None:
    assert steps(trainings, 0) == EPOCH[:3]
    assert steps(trainings, 3) == EPOCH[3:4]
    assert steps(trainings, 4) == [*EPOCH[4:], *EPOCH]
    # Two batches per step: the Trainer takes its two steps for four batches.
    assert steps(trainings, 5) == [*EPOCH[4:], *EPOCH]


def test_an_epoch_starts_again_if_the_dataset_has_another_length(
    trainings: subprocess.CompletedProcess[str],
) -> None:
    grown = [*EPOCH, [10, 11]]
    assert steps(trainings, 6) == grown + grown
    assert steps(trainings, 7) == grown
    told = [line for line in trainings.stderr.splitlines() if line.startswith("elastic_agent: ")]
    other = "has the position in other training data (length=10 in the checkpoint, 12 now): starting epoch"
    assert told == [
        f"elastic_agent: requested/checkpoint-4 {other} 0 from its beginning",
        f"elastic_agent: requested-resumed/checkpoint-5 {other} 1 from its beginning",
    ]
