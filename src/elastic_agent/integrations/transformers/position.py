"""Where training is in an epoch, independent of the number of workers; and what that is in the present world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elastic_agent.data import ElasticSampler


@dataclass(frozen=True)
class Rest:
    """What of an epoch is left when training resumes in the middle of it, in batches of the present world."""

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
        """Why a checkpoint's position does not fit the data; empty if it does."""
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
        left = len(loader)
        if left == 0:
            self.sampler.set_epoch(self.sampler.epoch + 1)
            left = in_epoch
        steps_left = -(-left // accumulation)
        steps_done = -(-in_epoch // accumulation) - steps_left
        done = steps_done * accumulation
        self.rest = Rest(self.sampler.epoch, done, done + left, steps_done + steps_left)
        return self.rest

    def skip(self, epoch: int, batches: int) -> None:
        """Continue after so many batches of the present world, on every rank."""
        self.sampler.set_epoch(epoch)
        self.advance(batches)

    def use(self, loader: Any) -> None:
        """The loader that training uses."""
        self._batch_size = loader.total_batch_size

    def advance(self, micro_batches: int) -> None:
        """An optimizer step with so many batches on every rank is finished."""
        self.sampler.advance(micro_batches * self._batch_size)
