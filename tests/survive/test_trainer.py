"""Copies of the training of a framework: all ranks make them at the same steps, and continue with the newest."""

from __future__ import annotations

import time
from pathlib import PurePosixPath
from typing import Any

import torch

from elastic_agent.survive.trainer import TrainingCopies
from tests.survive.support import Node


def train_until_copied(training: str, first: int, cannot_be_stored: int | None = None) -> tuple[int, int]:
    """Take steps until two copies were made; return after which steps, on each rank."""
    torch.distributed.init_process_group("gloo")
    copies, copied, step = TrainingCopies(training), [], first
    while len(copied) < 2:
        step += 1
        time.sleep(0.002)
        if copies.is_due(step):
            # An object that torch.load reads only if it is trusted, as hyperparameters of Lightning may be.
            more: Any = {"path": PurePosixPath("a")}
            if torch.distributed.get_rank() == cannot_be_stored:
                more = {"lock": (each for each in ())}
            copies.make(step, lambda step=step, more=more: {"weights": torch.full((3,), float(step)), **more})
            copied.append(step)
    return copied[0], copied[1]


def found(training: str, than: int) -> tuple[list[float], Any] | None:
    """Return what is in the copy with which every rank continues."""
    torch.distributed.init_process_group("gloo")
    copy = TrainingCopies(training).newest(than)
    return None if copy is None else (copy["weights"].tolist(), copy.get("path"))


def test_the_newest_copy_is_found_on_all_ranks_if_it_is_of_a_later_step(two: Node) -> None:
    copied = [worker.said for worker in two.run(train_until_copied, "t", 5, size=2)]
    assert copied[0] == copied[1]
    last = copied[0][1]
    for worker in two.run(found, "t", last - 1, size=2):
        assert worker.said == ([last] * 3, PurePosixPath("a"))


def test_a_copy_is_used_if_it_is_newer_and_no_worker_has_failed_with_it(two: Node) -> None:
    last = two.run(train_until_copied, "t", 5, size=2)[0].said[1]
    assert [worker.said for worker in two.run(found, "t", last, size=2)] == [None, None]
    for _ in range(2):  # another node joins
        assert [worker.said[0] for worker in two.run(found, "t", 0, size=2, restarts=7)] == [[last] * 3] * 2
    assert [worker.said for worker in two.run(found, "t", 0, size=2, restarts=8)] == [None, None]


def test_a_copy_of_another_training_is_not_used_and_gives_way(two: Node) -> None:
    two.run(train_until_copied, "t", 0, size=2)
    others = two.run(found, "another", 0, size=2)
    assert [worker.said for worker in others] == [None, None]
    assert "copies in memory are not used: they are not of this training" in others[0].errors
    assert [worker.said for worker in two.run(found, "t", 0, size=2)] == [None, None]


def test_a_rank_that_can_make_no_copy_says_so_once_and_gets_that_of_another(two: Node) -> None:
    workers = two.run(train_until_copied, "t", 0, 0, size=2)
    assert workers[0].said == workers[1].said
    assert workers[0].errors.count("no copies of the training in memory: ") == 1
    assert "no copies" not in workers[1].errors
    continued = two.run(found, "t", 0, size=2)
    assert [worker.said[0] for worker in continued] == [[workers[1].said[1]] * 3] * 2
    assert "from the memory of 1 of 2 workers" in continued[0].errors
