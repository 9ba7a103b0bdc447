"""Uses each sample of an epoch once: the sampler of the training data, and its place in checkpoints.

Several workers get an order of ours, which is that of Lightning's ``DistributedSampler``. An epoch that is continued,
in a world of any size, keeps the order in which it began. A single worker begins its epochs with the script's own
sampler, and continues those as Lightning does.
"""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from elastic_agent.data import ElasticSampler


class EpochSampler(ElasticSampler):
    """An ElasticSampler whose length is that of a whole epoch: Lightning counts batches from the epoch's beginning."""

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.num_replicas)  # type: ignore[arg-type]

    @property
    def left(self) -> int:
        """The number of samples that this rank still gets in this epoch."""
        return super().__len__()


class Samples:
    """The training data of one call of ``fit``."""

    def __init__(self, restored: dict[str, Any]) -> None:
        """Take what the callback has saved in the checkpoint that was loaded, if there is one."""
        self._state: dict[str, Any] | None = restored.get("sampler")
        self._loaders: list[tuple[EpochSampler, BatchSampler]] = []
        self.continued = False
        """Whether the loader continues an epoch where a checkpoint says."""
        self.refusal = ""
        """Why a checkpoint's position does not fit the data."""

    def release(self) -> None:
        """Forget the loaders, which are requested again."""
        self._loaders = []

    def sampler_for(
        self, loader: Any, *, shuffle: bool, epoch: int, world: dict[str, int] | None
    ) -> EpochSampler | None:
        """Return the sampler to use in a loader; None if the loader is used as it is.

        Args:
            loader: as the script made it.
            shuffle: whether Lightning would use a random order in a distributed strategy.
            epoch: the current one.
            world: ``num_replicas`` and ``rank``; None if the strategy is not a distributed one.
        """
        if not _is_ordinary(loader):
            return None
        state, self._state = self._state, None
        continues = state is not None and state["epoch"] == epoch and state["samples_finished"] > 0
        if world is None and not continues:
            return None
        place = world or {"num_replicas": 1, "rank": 0}
        sampler = EpochSampler(
            loader.dataset,
            place["num_replicas"],
            place["rank"],
            shuffle=shuffle if world is not None else type(loader.sampler) is RandomSampler,
            seed=int(os.environ.get("PL_GLOBAL_SEED", "0")),
        )
        sampler.set_epoch(epoch)
        if state is not None and continues:
            try:
                sampler.load_state_dict(state)
                self.continued = True
            except ValueError as error:
                self.refusal = str(error)
        self._loaders.append((sampler, loader.batch_sampler))
        return sampler

    def batches_done(self) -> int:
        """Return how many of the epoch's batches are done, if each had as many samples as in the present world."""
        sampler, batches = self._loaders[0]
        return _batches(batches, len(sampler)) - _batches(batches, sampler.left)

    def step_done(self) -> None:
        """Count a batch that all ranks have used."""
        for sampler, batches in self._loaders:
            sampler.advance(batches.batch_size)

    def state(self) -> dict[str, Any] | None:
        """Return the position for the checkpoint; None if one in the data cannot be given."""
        return self._loaders[0][0].state_dict() if len(self._loaders) == 1 else None


def translate_batches(counters: dict[str, Any], saved_in: int, world: int) -> None:
    """Have the counters of one worker's batches stand for as much of the epoch in a world of another size.

    In a world of three workers, 20 batches are as many samples as 30 batches of two workers.
    """
    if saved_in == world:
        return
    done = counters["ready"]
    moved = -(-done * saved_in // world) - done  # rounded up: never more than the epoch has
    for name in ("ready", "started", "processed", "completed"):
        counters[name] += moved


def _is_ordinary(loader: Any) -> bool:
    """Return whether the loader uses each sample of a dataset once, in batches of one size."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    if type(loader.batch_sampler) is not BatchSampler or loader.batch_sampler.sampler is not loader.sampler:
        return False
    sampler = loader.sampler
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    return type(sampler) is SequentialSampler


def _batches(batches: BatchSampler, samples: int) -> int:
    size = batches.batch_size
    return samples // size if batches.drop_last else -(-samples // size)
