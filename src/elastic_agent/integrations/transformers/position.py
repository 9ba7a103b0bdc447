"""The position of training in an epoch, in any world and in a checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_agent.data import ElasticSampler

STATE_FILE = "trainer_state.json"
"""The last file of a checkpoint to be written: without it, or with half of it, the checkpoint is not complete."""


@dataclass(frozen=True)
class Rest:
    """The rest of an epoch when training resumes in the middle of it, in batches of the present world."""

    epoch: int
    batches_done: int
    """As many batches of this world as have been trained, rounded to whole optimizer steps."""
    batches_in_epoch: int
    """Those, and the ones that are left."""
    steps_in_epoch: int
    """The same in optimizer steps."""


class Position:
    """The order of the samples, and those that are finished, of one call of ``Trainer.train``.

    Accelerate divides a sequence of batches among the ranks, so the sampler yields the samples of all ranks.
    """

    def __init__(self, sampler: ElasticSampler) -> None:
        self.sampler = sampler
        self.rest: Rest | None = None
        self._batch_size = 0

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def misfit(self, saved: dict[str, Any]) -> str:
        """Return why a checkpoint's position does not fit the data; empty if it does."""
        own = self.state_dict()
        return ", ".join(
            f"{name}={saved[name]} in the checkpoint, {own[name]} now"
            for name in ("length", "shuffle")
            if name in saved and saved[name] != own[name]
        )

    def restore(self, saved: dict[str, Any], loader: Any, accumulation: int) -> Rest:
        """Continue from a checkpoint; begin its epoch again if the position does not fit the data.

        Args:
            saved: what :meth:`state_dict` returned.
            loader: divides the sampler among the ranks of the present world.
            accumulation: batches per optimizer step on each rank.
        """
        in_epoch = len(loader)
        if self.misfit(saved):
            complete = saved["samples_finished"] >= saved["length"]
            self.sampler.set_epoch(saved["epoch"] + complete)
        else:
            self.sampler.load_state_dict(saved)
        batches_left = len(loader)
        if batches_left == 0:
            self.sampler.set_epoch(self.sampler.epoch + 1)
            batches_left = in_epoch
        steps_left = -(-batches_left // accumulation)
        steps_done = -(-in_epoch // accumulation) - steps_left
        done = steps_done * accumulation
        self.rest = Rest(self.sampler.epoch, done, done + batches_left, steps_done + steps_left)
        return self.rest

    def skip(self, epoch: int, batches: int) -> None:
        """Continue after so many batches of the present world, on every rank."""
        self.sampler.set_epoch(epoch)
        self.advance(batches)

    def use(self, loader: Any) -> None:
        """Take the batch size of the loader that training uses."""
        self._batch_size = loader.total_batch_size

    def advance(self, micro_batches: int) -> None:
        """Count the samples of a finished optimizer step with so many batches on every rank."""
        self.sampler.advance(micro_batches * self._batch_size)


# -- in a checkpoint of the ``Trainer`` -----------------------------------------------------------


def saved(checkpoint: str | Path) -> dict[str, Any]:
    """Return what ``ElasticCallback`` saved in the checkpoint; empty if it was saved without."""
    state: Any = trainer_state(checkpoint)
    for name in ("stateful_callbacks", "ElasticCallback", "attributes", "saved"):
        state = state.get(name) if isinstance(state, dict) else None
    return state if isinstance(state, dict) else {}


def trainer_state(checkpoint: str | Path) -> dict[str, Any]:
    """Read the checkpoint's ``trainer_state.json``; empty if it has none that is complete and readable."""
    try:
        state = json.loads((Path(checkpoint) / STATE_FILE).read_text())
    except (OSError, ValueError, RecursionError):
        return {}  # on rank 0 alone, an error would leave the other ranks waiting for its choice
    return state if isinstance(state, dict) else {}
