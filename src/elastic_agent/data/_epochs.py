"""The order of the samples in an epoch, and how many of them are finished: independent of the world."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_agent import client

_RESTORED = ("epoch", "samples_finished", "length", "seed", "shuffle")


class ElasticEpochs:
    """The common part of both samplers: the permutation of an epoch, and the position in it.

    A *pass* is one iteration over the sampler. It starts at the first sample that is not finished, and what it yields
    is decided when it starts, because data loaders fetch ahead.
    """

    epoch: int
    """The current epoch, from 0. Set it with :meth:`set_epoch`."""
    seed: int
    shuffle: bool

    def _begin(self, length: int) -> None:
        self._length = length
        self._finished = 0
        self._pass_start = 0
        self._fresh(exhausted=False)

    def _fresh(self, *, exhausted: bool) -> None:
        """Begin a pass of which no step has been reported."""
        self._exhausted = exhausted
        self._may_remain: int | None = None

    @property
    def samples_finished(self) -> int:
        """The number of samples of this epoch that all ranks together have finished."""
        return self._finished

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch of the next pass: all of it, or, if it is the current one, what is left of it.

        Not required: without it, the pass after a complete one is over the next epoch.
        """
        if epoch != self.epoch:
            self.epoch = epoch
            self._finished = 0
        self._pass_start = self._finished
        self._fresh(exhausted=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, for a checkpoint: small, and the same on every rank.

        Save it together with the model, after :meth:`advance` and before the next step.
        """
        return {
            "epoch": self.epoch,
            "samples_finished": self._finished,
            "length": self._length,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint, in a world of any size. Call it before the pass starts, on every rank.

        The seed of the checkpoint replaces that of this sampler.

        Raises:
            ValueError: the checkpoint belongs to a dataset of another length, to another order (``shuffle``), or is
                not one of this class.
        """
        missing = [name for name in _RESTORED if name not in state_dict]
        if missing:
            raise ValueError(
                f"{type(self).__name__}.load_state_dict: {', '.join(missing)} not in {sorted(state_dict)}; "
                f"expected what state_dict() of this class returned"
            )
        for name, own in (("length", self._length), ("shuffle", self.shuffle)):
            if state_dict[name] != own:
                raise ValueError(
                    f"{type(self).__name__}.load_state_dict: the checkpoint has {name}={state_dict[name]}, expected "
                    f"{own} as in this sampler: the order of the samples is another. To start the epoch again, load "
                    "no state."
                )
        self.epoch = state_dict["epoch"]
        self.seed = state_dict["seed"]
        self._finished = self._pass_start = state_dict["samples_finished"]
        self._fresh(exhausted=self._samples_in_pass() == 0)

    def _samples_in_pass(self) -> int:
        """Return how many samples the current or next pass has on this rank; 0 if the epoch is complete."""
        raise NotImplementedError

    def _start_pass(self) -> Tensor:
        """Begin a pass; return the indices of the samples that are not finished, in order."""
        if self._epoch_ended():
            self.epoch += 1
            self._finished = 0
        self._fresh(exhausted=False)
        self._pass_start = self._finished
        return self._order()[self._pass_start :]

    def _epoch_ended(self) -> bool:
        """Return whether the next pass is over the next epoch.

        A loader that fetches ahead exhausts the sampler early. If steps were reported, they decide, so that an epoch
        that the program left early is continued, whatever the loader had fetched.
        """
        if self._may_remain is None:
            return self._exhausted
        return self._exhausted and self._length - self._finished <= self._may_remain

    def _order(self) -> Tensor:
        """Return all samples of the epoch, for seed and epoch in the order of torch's ``DistributedSampler``."""
        if not self.shuffle:
            return torch.arange(self._length)
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        return torch.randperm(self._length, generator=generator)

    def _finish(self, samples: int, may_remain: int) -> None:
        """Count the samples of a step; up to ``may_remain`` are not used at the end of an epoch."""
        self._may_remain = max(self._may_remain or 0, may_remain)
        self._finished = min(self._finished + samples, self._length)


def length_of(dataset: Sized, kind: str) -> int:
    """Return the dataset's length; TypeError for one that has none."""
    try:
        length = len(dataset)
    except TypeError:
        raise TypeError(
            f"{kind}: a dataset of type {type(dataset).__name__} has no length; expected one with a fixed length and "
            "access by index. An IterableDataset has to save its own position."
        ) from None
    if length < 1:
        raise ValueError(f"{kind}: the dataset is empty; expected at least one sample")
    return length


def place(num_replicas: int | None, rank: int | None, kind: str) -> tuple[int, int]:
    """Return world size and rank: as given, of the default process group, or as the launcher set them."""
    if num_replicas is None or rank is None:
        size, own = _world()
        num_replicas = size if num_replicas is None else num_replicas
        rank = own if rank is None else rank
    if not 0 <= rank < num_replicas:
        raise ValueError(
            f"{kind}: rank={rank}; expected 0 to {num_replicas - 1}, as num_replicas={num_replicas}"
        )
    return num_replicas, rank


def _world() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    placement = client.current().placement
    return placement.world_size, placement.rank
