"""Uses each sample of an epoch once: the sampler of the training data, and its place in checkpoints.

Several workers get an order of ours, which is that of Lightning's ``DistributedSampler``. A single worker keeps the
script's own sampler, with its seeds and its generator. An epoch that is continued, in a world of any size, keeps the
order in which it began.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from elastic_agent.data import ElasticSampler


class _Continued:
    """The rest of an epoch that is continued, in its own order."""

    def __init__(self, state: dict[str, Any], own: Any) -> None:
        """Take the position from a checkpoint; ``own``: the script's sampler. ValueError: it does not fit the data."""
        length, shuffles = len(own.data_source), type(own) is RandomSampler
        if state["length"] != length or state.get("own", shuffles) != shuffles:
            now = f"length={length}, shuffle={shuffles}"
            then = f"length={state['length']}, shuffle={state.get('own', shuffles)}"
            raise ValueError(f"the checkpoint has a position in training data with {then}, expected {now}")
        self.state = state
        self.epoch: int = state["epoch"]
        self.finished: int = state["samples_finished"]
        self._own = own

    def rest(self) -> Iterator[int]:
        """Continue the script's sampler, whose generator is used up as if it had not been interrupted."""
        if "own" not in self.state:
            yield from self.order()[self.finished :].tolist()
            return
        with _replaying(self._own, self.state["generator"], restore_own=False):
            rest = iter(self._own)
            for _ in range(self.finished):
                next(rest)
        yield from rest

    def order(self) -> Tensor:
        """Return all samples of the epoch."""
        if "own" not in self.state:
            shuffle, seed = self.state["shuffle"], self.state["seed"]
            sampler = ElasticSampler(self._own.data_source, 1, 0, shuffle=shuffle, seed=seed)
            sampler.set_epoch(self.epoch)
            return torch.tensor([*sampler])
        with _replaying(self._own, self.state["generator"], restore_own=True):
            return torch.tensor([*self._own])


@contextmanager
def _replaying(own: Any, state: Tensor | None, *, restore_own: bool) -> Iterator[None]:
    """Have the sampler give the order that it gave with this state of its generator.

    Args:
        own: the script's sampler.
        state: of its generator, as the epoch began.
        restore_own: restore the state also of a generator that the script made, not only of torch's.
    """
    generator = _generator_of(own)
    if generator is None or state is None:
        yield
        return
    now = generator.get_state()
    generator.set_state(state)
    yield
    if restore_own or generator is torch.default_generator:
        generator.set_state(now)


def _generator_of(own: Any) -> Any:
    return (own.generator or torch.default_generator) if type(own) is RandomSampler else None


class EpochSampler(ElasticSampler):
    """An ElasticSampler whose length is that of a whole epoch: Lightning counts batches from the epoch's beginning."""

    _continued: _Continued | None = None

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.num_replicas)  # type: ignore[arg-type]

    def continue_epoch(self, continued: _Continued) -> None:
        """Begin with the rest of an epoch."""
        self._continued = continued
        self.set_epoch(continued.epoch)
        self._finished = self._pass_start = continued.finished
        self._fresh(exhausted=self._samples_in_pass() == 0)

    def _order(self) -> Tensor:
        if self._continued is not None and self._continued.epoch == self.epoch:
            return self._continued.order()
        return super()._order()

    def state_dict(self) -> dict[str, Any]:
        if self._continued is not None and self._continued.epoch == self.epoch:
            return {**self._continued.state, "samples_finished": self._finished}
        return super().state_dict()

    @property
    def left(self) -> int:
        """The number of samples that this rank still gets in this epoch."""
        return super().__len__()


class OwnSampler(Sampler[int]):
    """The script's sampler on a single worker: gives the same samples, and knows where it is."""

    def __init__(self, own: RandomSampler | SequentialSampler, epoch: int) -> None:
        self.own = own
        self._generator = _generator_of(own)
        self._began: Tensor | None = None
        self._epoch = epoch
        self._finished = 0
        self._continued: _Continued | None = None

    def __len__(self) -> int:
        return len(self.own)

    def __iter__(self) -> Iterator[int]:
        continued = self._continued
        if continued is None or self.left == 0:
            self._continued = None
            self._began = self._generator.get_state() if self._generator is not None else None
            self._finished = 0
            yield from self.own
            return
        yield from continued.rest()

    def continue_epoch(self, continued: _Continued) -> None:
        """Begin with the rest of an epoch."""
        self._continued = continued
        self._finished = continued.finished

    def set_epoch(self, epoch: int) -> None:
        """Take the number of the epoch that begins or continues, from Lightning."""
        if epoch != self._epoch:
            self._epoch, self._finished, self._continued = epoch, 0, None

    def advance(self, samples: int) -> None:
        """Count the samples that a step has used."""
        self._finished = min(self._finished + samples, len(self))

    def state_dict(self) -> dict[str, Any]:
        if self._continued is not None:
            return {**self._continued.state, "samples_finished": self._finished}
        shuffles = type(self.own) is RandomSampler
        position = {"epoch": self._epoch, "samples_finished": self._finished, "length": len(self)}
        return {**position, "own": shuffles, "generator": self._began}

    @property
    def left(self) -> int:
        """The number of samples that are left in this epoch."""
        return len(self) - self._finished


class Samples:
    """The training data of one call of ``fit``."""

    def __init__(self, restored: dict[str, Any]) -> None:
        self._state: dict[str, Any] | None = restored.get("sampler")
        self._loaders: list[tuple[EpochSampler | OwnSampler, BatchSampler]] = []
        self.continued = False
        """The loader continues an epoch where a checkpoint says."""
        self.refusal = ""
        """Why a checkpoint's position does not fit the data."""

    def release(self) -> None:
        """Leave the script's loaders as they were: they are requested again, or training is over."""
        for sampler, batches in self._loaders:
            if isinstance(sampler, OwnSampler):
                batches.sampler = sampler.own
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
        own, state = loader.sampler, self._state
        self._state = None
        sampler: EpochSampler | OwnSampler
        if world is None:
            sampler = loader.batch_sampler.sampler = OwnSampler(own, epoch)
        else:
            seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
            sampler = EpochSampler(
                loader.dataset, world["num_replicas"], world["rank"], shuffle=shuffle, seed=seed
            )
            sampler.set_epoch(epoch)
        if state is not None and state["epoch"] == epoch and state["samples_finished"] > 0:
            try:
                sampler.continue_epoch(_Continued(state, own))
                self.continued = True
            except ValueError as error:
                self.refusal = str(error)
        self._loaders.append((sampler, loader.batch_sampler))
        return sampler if isinstance(sampler, EpochSampler) else None

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
