"""Lightning training that is left on a notice and resumed in a world of the same size is the same training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.client.support import run_script

SCRIPT = Path(__file__).parent / "lightning_interrupted.py"
CHECKED = ("epochs", "accumulating", "in-order", "from-last")
OTHERS = ("steps", "validating", "saved-by-a-thread")
"""Kinds for `make prove`: they are left and resumed by the same code as those that `make test` checks."""

each_kind = pytest.mark.parametrize(
    "kind", [*CHECKED, *(pytest.param(kind, marks=pytest.mark.prove) for kind in OTHERS)]
)


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(tmp_path_factory.mktemp("trainings"), *CHECKED)


@pytest.fixture(scope="module")
def other_trainings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(tmp_path_factory.mktemp("trainings"), *OTHERS)


@pytest.fixture
def training(request: pytest.FixtureRequest, kind: str) -> Any:
    return request.getfixturevalue("trainings" if kind in CHECKED else "other_trainings")[kind]


def train(folder: Path, *kinds: str) -> Any:
    done = run_script(SCRIPT, {"OMP_NUM_THREADS": "1"}, folder, *kinds)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.prove
@each_kind
def test_the_weights_are_bit_identical_to_those_of_an_uninterrupted_training(training: Any) -> None:
    for _, resumed in training["parts"]:
        assert resumed["weights"] == training["whole"]["weights"]


@each_kind
def test_every_batch_is_used_once(training: Any) -> None:
    for left, resumed in training["parts"]:
        assert left["batches"] + resumed["batches"] == training["whole"]["batches"]


def test_one_worker_uses_samples_that_are_not_shuffled_in_their_order(trainings: Any) -> None:
    batches = trainings["in-order"]["whole"]["batches"]
    assert [sample for _, _, ids in batches for sample in ids] == 2 * [*range(50)]


def test_training_is_left_within_an_epoch_and_between_two(trainings: Any) -> None:
    assert [len(left["batches"]) for left, _ in trainings["epochs"]["parts"]] == [6, 13]


@each_kind
def test_the_agent_sees_that_the_worker_has_saved_and_left(training: Any) -> None:
    for left, resumed in training["parts"]:
        assert (left["code"], left["left"]) == (0, True)
        assert (resumed["code"], resumed["left"]) == (0, False)
        assert left["batches"]
        assert resumed["batches"]


def test_every_step_is_reported_and_no_heartbeat_is_sent(trainings: Any) -> None:
    """A script that sends none has not promised any."""
    whole = trainings["epochs"]["whole"]
    assert (whole["beats"], whole["step"]) == (0, 39)


def test_gradients_that_are_being_accumulated_are_not_lost(trainings: Any) -> None:
    ((left, _),) = trainings["accumulating"]["parts"]
    assert len(left["batches"]) == 6, "the notice came after batch 5, in the middle of a step"
