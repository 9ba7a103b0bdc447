"""Implements :class:`elastic_agent.data.ElasticSampler`."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from elastic_agent.data._epochs import ElasticEpochs, length_of, place

_CHUNK = 1 << 16
"""The number of indices that become Python integers at a time; datasets may have billions of samples."""


class ElasticSampler(ElasticEpochs, DistributedSampler[int]):
    """A ``DistributedSampler`` that continues an epoch where it was, also with another number of workers.

    In a world that does not change, it gives the same samples as torch's. After a change, the samples of the epoch
    that are not finished are divided among the new ranks: rank r takes every n-th of them, starting with the r-th.

    Use the same batch size on all ranks; for others, see :class:`ElasticBatchSampler`. Every rank gets the same
    number of samples. If the number of samples left is not divisible by the number of ranks, some of those at the
    beginning of the epoch are used a second time, or, with ``drop_last``, the last ones are not used in this epoch:
    in both cases fewer than there are ranks.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        """Take the parameters of torch's ``DistributedSampler``.

        Args:
            dataset: what is sampled from; it must have a length.
            num_replicas: number of ranks; None: that of the default process group, or, before it is initialised, the
                one set by the launcher.
            rank: this rank, from 0; None: likewise.
            shuffle: use a random order in each epoch; otherwise the dataset's.
            seed: for the random order, the same on every rank.
            drop_last: leave out the last samples of an epoch instead of using some twice.

        Raises:
            TypeError: the dataset has no length.
            ValueError: the dataset is empty, or the rank is not one of ``num_replicas``.
        """
        length = length_of(dataset, "ElasticSampler")
        num_replicas, rank = place(num_replicas, rank, "ElasticSampler")
        super().__init__(cast(Any, dataset), num_replicas, rank, shuffle, seed, drop_last)
        self._begin(length)

    def __iter__(self) -> Iterator[int]:
        """Return the samples of this rank that are not finished, from now to the end of the epoch."""
        rest = self._start_pass()
        return self._pass(self._share(rest))

    def _pass(self, share: Tensor) -> Iterator[int]:
        for begin in range(0, len(share), _CHUNK):
            yield from share[begin : begin + _CHUNK].tolist()
        self._exhausted = True

    def _share(self, rest: Tensor) -> Tensor:
        count = self._samples_in_pass()
        share = rest[self.rank :: self.num_replicas][:count]
        if len(share) == count:
            return share
        # One is missing: the samples used twice are the first ones of the epoch, as with torch's sampler.
        position = (self.rank - len(rest)) % self.num_replicas % self._length
        return torch.cat([share, self._order()[position : position + 1]])

    def __len__(self) -> int:
        """Return how many samples this rank gets in the current pass, or in the next if none has begun."""
        return self._samples_in_pass()

    def _samples_in_pass(self) -> int:
        rest = self._length - self._pass_start
        return rest // self.num_replicas if self.drop_last else -(-rest // self.num_replicas)

    def advance(self, samples: int) -> None:
        """Report that a step is finished. Call it on every rank, after each step, before a checkpoint is saved.

        Samples that a data loader has fetched, but that no finished step has used, do not count as finished.

        Args:
            samples: how many this rank used in the step, usually the length of its batch; all ranks use the same
                number.
        """
        if samples < 0:
            raise ValueError(f"ElasticSampler.advance: samples={samples}; expected at least 0")
        used = samples * self.num_replicas
        # A data loader with drop_last leaves out less than a step.
        self._finish(used, may_remain=used - 1)
