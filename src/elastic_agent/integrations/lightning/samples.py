"""Uses each sample of an epoch once: the sampler of the training data, and its place in checkpoints.

Several workers get an order of ours, which is that of Lightning's ``DistributedSampler``. An epoch that is continued,
in a world of any size, keeps the order in which it began. A single worker keeps the order of the script's own sampler;
if that shuffles, its position is not known.
"""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from elastic_agent.data import ElasticSampler


class EpochSampler(ElasticSampler):
    """An ElasticSampler whose length is that of a whole epoch: Lightning counts batches from the epoch's beginning."""

    _own_order: tuple[bool, int] | None = None
    """``shuffle`` and ``seed`` of the epochs after one that is continued."""

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.num_replicas)  # type: ignore[arg-type]

    def continue_epoch(self, state: dict[str, Any]) -> None:
        """Begin with the rest of an epoch, in the order in which it began. ValueError: the data are others."""
        length = len(self.dataset)  # type: ignore[arg-type]
        if state["length"] != length:
            raise ValueError(
                f"the checkpoint has a position in training data with length={state['length']}, expected {length}"
            )
        self._own_order = self.shuffle, self.seed
        self.shuffle = state.get("shuffle", self.shuffle)  # else loading fails
        self.load_state_dict(state)

    def set_epoch(self, epoch: int) -> None:
        """Be told by Lightning which epoch begins or continues."""
        if epoch != self.epoch and self._own_order is not None:
            self.shuffle, self.seed = self._own_order
        super().set_epoch(epoch)

    @property
    def left(self) -> int:
        """How many samples this rank still gets in this epoch."""
        return super().__len__()


class Samples:
    """The training data of one call of ``fit``."""

    def __init__(self, restored: dict[str, Any]) -> None:
        self._state: dict[str, Any] | None = restored.get("sampler")
        self._loaders: list[tuple[EpochSampler, BatchSampler]] = []
        self._own: list[tuple[Sampler[int], BatchSampler]] = []
        """The script's samplers that were replaced in its loaders."""
        self.continued = False
        """Whether the loader continues an epoch where a checkpoint says."""
        self.refusal = ""
        """Why a checkpoint's position does not fit the data."""

    def release(self) -> None:
        """Leave the script's loaders as they were: they are requested again, or training is over."""
        for own, batches in self._own:
            batches.sampler = own
        self._loaders, self._own = [], []

    def sampler_for(
        self, loader: Any, *, shuffle: bool, epoch: int, world: dict[str, int] | None
    ) -> EpochSampler | None:
        """Return the sampler to use in a loader; None if Lightning uses the loader as it is.

        Args:
            loader: as the script made it.
            shuffle: whether Lightning would use a random order in a distributed strategy.
            epoch: the current one.
            world: ``num_replicas`` and ``rank``; None if the strategy is not a distributed one.
        """
        if not _is_ordinary(loader):
            return None
        state, self._state = self._state, None
        own = loader.sampler
        is_alone, shuffles_alone = world is None, type(own) is RandomSampler
        sampler = EpochSampler(
            loader.dataset,
            num_replicas=1 if world is None else world["num_replicas"],
            rank=0 if world is None else world["rank"],
            shuffle=shuffles_alone if is_alone else shuffle,
            seed=int(os.environ.get("PL_GLOBAL_SEED", "0")),
        )
        sampler.set_epoch(epoch)
        continues = False
        if state is not None and state["epoch"] == epoch and state["samples_finished"] > 0:
            try:
                sampler.continue_epoch(state)
                continues = self.continued = True
            except ValueError as error:
                self.refusal = str(error)
        if is_alone and shuffles_alone and not continues:
            return None
        self._loaders.append((sampler, loader.batch_sampler))
        if not is_alone:
            return sampler
        self._own.append((own, loader.batch_sampler))
        loader.batch_sampler.sampler = sampler
        return None

    def batches_done(self) -> int:
        """Return how many of the epoch's batches are done, if each had as many samples as in the present world."""
        sampler, batches = self._loaders[0]
        return _batches(batches, len(sampler)) - _batches(batches, sampler.left)

    def step_done(self) -> None:
        """All ranks have used one batch."""
        for sampler, batches in self._loaders:
            sampler.advance(batches.batch_size)

    def state(self) -> dict[str, Any] | None:
        """Return the position for the checkpoint; None if one in the data cannot be given."""
        return self._loaders[0][0].state_dict() if len(self._loaders) == 1 else None


def _is_ordinary(loader: Any) -> bool:
    """Whether the loader uses each sample of a dataset once, in batches of one size."""
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
