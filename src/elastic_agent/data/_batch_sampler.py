"""Implements :class:`elastic_agent.data.ElasticBatchSampler`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass

from torch import Tensor
from torch.utils.data import Sampler

from elastic_agent.data._epochs import ElasticEpochs, length_of, place

_NAME = "ElasticBatchSampler"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One batch of this rank, and its part in an optimizer step."""

    samples: int
    """The number of its samples. 0: this rank has none left for it, and the batch consists of one sample whose weight
    is 0, so that all ranks take part in the same collectives."""
    weight: float
    """Multiply the mean loss of the batch by it. The gradients that DDP or FSDP averages over the ranks are then those
    of the mean loss over all samples of the step, on all ranks."""
    completes_step: bool
    """True if it is the last one before the optimizer's step."""


class ElasticBatchSampler(ElasticEpochs, Sampler[list[int]]):
    """Divides each optimizer step's samples among the ranks, for ``DataLoader(batch_sampler=…)``.

        sampler = ElasticBatchSampler(dataset, global_batch_size=256, micro_batch_size=32)
        loader = DataLoader(dataset, batch_sampler=sampler)
        for (x, y), micro in zip(loader, sampler.micro_batches()):
            with contextlib.nullcontext() if micro.completes_step else model.no_sync():
                (loss(model(x), y) * micro.weight).backward()
            if micro.completes_step:
                optimizer.step()
                optimizer.zero_grad()
                sampler.advance()

    With ``global_batch_size``, each step uses the same samples whatever the number of ranks, so that the loss does
    not depend on it (except for rounding). With ``batch_size``, each rank has batches of a constant size.

    Every rank gets the same number of batches. The batches of a rank, and those of different ranks, may differ in
    size. No sample is used twice in an epoch, and none is left out unless ``drop_last`` is set: the last step of an
    epoch divides what is left.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        global_batch_size: int | None = None,
        batch_size: int | Sequence[int] | None = None,
        micro_batch_size: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        """Take either ``global_batch_size`` or ``batch_size``; exactly one of them is required.

        Args:
            dataset: what is sampled from; it must have a length.
            global_batch_size: number of samples per optimizer step, of all ranks together.
            batch_size: number of samples per optimizer step and rank. A list has one number for each rank, and must
                be the same on all ranks.
            micro_batch_size: the largest batch to yield. A rank's samples of a step are divided into as many batches
                as this requires (gradient accumulation); None: one.
            num_replicas: number of ranks; None: that of the default process group, or, before it is initialised, the
                one set by the launcher.
            rank: this rank, from 0; None: likewise.
            shuffle: use a random order in each epoch; otherwise the dataset's.
            seed: for the random order, the same on every rank.
            drop_last: leave out the last step of an epoch if it has fewer samples than the others.

        Raises:
            TypeError: the dataset has no length.
            ValueError: a size is less than 1, or both or neither of the two are given.
        """
        length = length_of(dataset, _NAME)
        self.num_replicas, self.rank = place(num_replicas, rank, _NAME)
        self.epoch = 0
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        sizes = _sizes(global_batch_size, batch_size, self.num_replicas)
        if micro_batch_size is not None and micro_batch_size < 1:
            raise ValueError(f"{_NAME}: micro_batch_size={micro_batch_size}; expected at least 1")
        self.global_batch_size = sum(sizes)
        self._micro_batch_size = micro_batch_size or max(sizes)
        self._owners = _deal(sizes)
        self._begin(length)
        if drop_last and self.steps_per_epoch == 0:
            raise ValueError(
                f"{_NAME}: {self.global_batch_size} samples per step and drop_last, but the dataset has only "
                f"{self._length}; expected at least one full step"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch in the current world, for learning-rate schedules."""
        return self._steps(self._length)

    def __iter__(self) -> Iterator[list[int]]:
        """Return this rank's batches, from the first sample that is not finished to the end of the epoch."""
        return self._pass(self._start_pass())

    def _pass(self, rest: Tensor) -> Iterator[list[int]]:
        for step in range(self._steps(len(rest))):
            together = rest[step * self.global_batch_size :][: self.global_batch_size].tolist()
            own = [index for index, owner in zip(together, self._owners, strict=False) if owner == self.rank]
            begin = 0
            for size in self._micro_sizes(len(together)):
                yield own[begin : begin + size] or together[:1]
                begin += size
        self._exhausted = True

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Describe the batches of the pass that begins now, one after the other. Use it as in the example of
        the class."""
        start = 0 if self._epoch_ended() else self._finished
        return self._described(self._length - start)

    def _described(self, rest: int) -> Iterator[MicroBatch]:
        for step in range(self._steps(rest)):
            together = min(self.global_batch_size, rest - step * self.global_batch_size)
            sizes = self._micro_sizes(together)
            for number, size in enumerate(sizes, 1):
                yield MicroBatch(size, size * self.num_replicas / together, number == len(sizes))

    def __len__(self) -> int:
        """Return how many batches this rank gets in the current pass, or in the next if none has begun."""
        rest = self._length - self._pass_start
        full, remainder = divmod(rest, self.global_batch_size)
        batches = full * len(self._micro_sizes(self.global_batch_size))
        return batches + (len(self._micro_sizes(remainder)) if remainder and not self.drop_last else 0)

    def _samples_in_pass(self) -> int:
        rest = self._length - self._pass_start
        return self._steps(rest) and rest

    def advance(self) -> None:
        """Report that an optimizer step is finished. Call it on every rank, before a checkpoint is saved.

        Samples that a data loader has fetched, but that no finished step has used, do not count as finished.
        """
        self._finish(self.global_batch_size, may_remain=self.global_batch_size - 1 if self.drop_last else 0)

    def _steps(self, samples: int) -> int:
        size = self.global_batch_size
        return samples // size if self.drop_last else -(-samples // size)

    def _micro_sizes(self, together: int) -> list[int]:
        """Return the sizes of this rank's batches in a step that has so many samples in all; as many as on
        every rank."""
        shares = Counter(self._owners[:together])
        count = -(-max(shares.values()) // self._micro_batch_size)
        size, larger = divmod(shares[self.rank], count)
        return [size + (number < larger) for number in range(count)]


def _sizes(global_batch_size: int | None, batch_size: int | Sequence[int] | None, ranks: int) -> list[int]:
    """Return how many samples each rank has in a full step."""
    if (global_batch_size is None) == (batch_size is None):
        raise ValueError(
            f"{_NAME}: global_batch_size={global_batch_size}, batch_size={batch_size}; expected exactly one of them"
        )
    if global_batch_size is not None:
        if global_batch_size < 1:
            raise ValueError(f"{_NAME}: global_batch_size={global_batch_size}; expected at least 1")
        size, larger = divmod(global_batch_size, ranks)
        return [size + (rank < larger) for rank in range(ranks)]
    assert batch_size is not None
    sizes = [batch_size] * ranks if isinstance(batch_size, int) else list(batch_size)
    if len(sizes) != ranks or min(sizes) < 1:
        raise ValueError(
            f"{_NAME}: batch_size={batch_size}; expected at least 1 for each of the {ranks} ranks"
        )
    return sizes


def _deal(sizes: list[int]) -> list[int]:
    """Return the rank that gets each sample of a step: in turn, without those that have enough.

    With equal sizes, rank r gets every n-th one starting with the r-th, as from :class:`ElasticSampler`.
    """
    return [rank for turn in range(max(sizes)) for rank, size in enumerate(sizes) if turn < size]
