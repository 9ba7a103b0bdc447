"""Uses each sample of an epoch once: the sampler of the training data, and its place in checkpoints."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from elastic_agent.data import ElasticSampler


class EpochSampler(ElasticSampler):
    """An ElasticSampler whose length is that of a whole epoch: Lightning counts batches from the epoch's beginning."""

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.num_replicas)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.shuffle = getattr(self, "_own_shuffle", self.shuffle)
        super().set_epoch(epoch)

    def continue_epoch(self, state: dict[str, Any]) -> None:
        """Load a position in the present epoch, which keeps the order in which it began.

        With a sequential sampler, Lightning uses a random order in worlds of several workers only.
        """
        self._own_shuffle = self.shuffle
        self.shuffle = state.get("shuffle", self.shuffle)
        try:
            self.load_state_dict(state)
        except ValueError:
            self.shuffle = self._own_shuffle
            raise

    @property
    def left(self) -> int:
        """How many samples this rank still gets in this epoch."""
        return super().__len__()


class Samples:
    """The training data of one call of ``fit``."""

    def __init__(self, restored: dict[str, Any]) -> None:
        self._state: dict[str, Any] | None = restored.get("sampler")
        self._loaders: list[tuple[EpochSampler, BatchSampler]] = []
        self.continued = False
        """Whether the loader continues an epoch where a checkpoint says."""
        self.refusal = ""
        """Why a checkpoint's position does not fit the data."""

    def reload(self) -> None:
        """The script's loaders are requested (again)."""
        self._loaders = []

    def sampler_for(
        self, loader: Any, *, shuffle: bool, epoch: int, world: dict[str, int] | None
    ) -> EpochSampler | None:
        """The sampler to use in a loader; None if its own has to stay.

        Args:
            loader: as the script made it.
            shuffle: whether Lightning would use a random order in a distributed strategy.
            epoch: the current one.
            world: ``num_replicas`` and ``rank``; None if the strategy is not a distributed one.
        """
        if not _is_ordinary(loader):
            return None
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        ranks, rank = (world["num_replicas"], world["rank"]) if world else (1, 0)
        shuffle = shuffle and (world is not None or isinstance(loader.sampler, RandomSampler))
        sampler = EpochSampler(loader.dataset, ranks, rank, shuffle=shuffle, seed=seed)
        sampler.set_epoch(epoch)
        if self._state is not None and self._state["epoch"] == epoch:
            try:
                sampler.continue_epoch(self._state)
                self.continued = True
            except ValueError as error:
                self.refusal = str(error)
        self._state = None
        self._loaders.append((sampler, loader.batch_sampler))
        return sampler

    def batches_done(self) -> int:
        """How many of the epoch's batches are done, if each had as many samples as in the present world."""
        sampler, batches = self._loaders[0]
        return _batches(batches, len(sampler)) - _batches(batches, sampler.left)

    def step_done(self) -> None:
        """All ranks have used one batch."""
        for sampler, batches in self._loaders:
            sampler.advance(batches.batch_size)

    def state(self) -> dict[str, Any] | None:
        """For the checkpoint; None if a position in the data cannot be given."""
        return self._loaders[0][0].state_dict() if len(self._loaders) == 1 else None


def _is_ordinary(loader: Any) -> bool:
    """Whether the loader uses each sample of a dataset once, in batches of one size."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    if type(loader.batch_sampler) is not BatchSampler:
        return False
    sampler = loader.sampler
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    return type(sampler) is SequentialSampler


def _batches(batches: BatchSampler, samples: int) -> int:
    size = batches.batch_size
    return samples // size if batches.drop_last else -(-samples // size)
