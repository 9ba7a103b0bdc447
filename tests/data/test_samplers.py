"""Samplers that continue an epoch in another world: every sample once, the same number of batches on every rank."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from elastic_agent.data import ElasticBatchSampler, ElasticSampler

State = dict[str, Any]
Sampler = TypeVar("Sampler", ElasticSampler, ElasticBatchSampler)

lengths = st.integers(1, 200)
world_sizes = st.integers(1, 9)
batch_sizes = st.integers(1, 8)
seeds = st.integers(0, 2**31)


def loader_of(numbers: range, *args: Any, workers: int, **options: Any) -> DataLoader[Any]:
    """A loader whose processes are not forked from this one, where gRPC and an event loop may run by other tests."""
    context = "forkserver" if workers else None
    return DataLoader(numbers, *args, num_workers=workers, multiprocessing_context=context, **options)  # type: ignore[arg-type]


def loaded(made: list[Sampler], state: State | None) -> list[Sampler]:
    """Continue from a state, as the workers of a generation do; one sampler for each rank."""
    for sampler in made:
        if state is not None:
            sampler.load_state_dict(state)
            sampler.set_epoch(state["epoch"])
    return made


def samplers(world: int, length: int, state: State | None, **options: Any) -> list[ElasticSampler]:
    return loaded([ElasticSampler(range(length), world, rank, **options) for rank in range(world)], state)


def train(ranks: list[ElasticSampler], batch_size: int, steps: int | None = None) -> list[int]:
    """Ids of the samples in so many steps, or to the end of the epoch; all ranks take the same number."""
    loaders = [iter(DataLoader(sampler.dataset, batch_size, sampler=sampler)) for sampler in ranks]
    used: list[int] = []
    for _ in range(steps) if steps is not None else itertools.count():
        batches = [next(loader, None) for loader in loaders]
        if batches[0] is None:
            assert batches == [None] * len(ranks)
            break
        for sampler, batch in zip(ranks, batches, strict=True):
            assert batch is not None
            used += batch.tolist()
            sampler.advance(len(batch))
    states = [sampler.state_dict() for sampler in ranks]
    assert states == [states[0]] * len(ranks), "any rank's state may be saved"
    return used


@given(lengths, world_sizes, seeds, st.integers(0, 5), st.booleans(), st.booleans())
def test_samples_are_those_of_distributed_sampler_while_the_world_does_not_change(
    length: int, world: int, seed: int, epoch: int, shuffle: bool, drop_last: bool
) -> None:
    for rank in range(world):
        own = ElasticSampler(range(length), world, rank, shuffle, seed, drop_last)
        torchs: DistributedSampler[int] = DistributedSampler(
            range(length),  # type: ignore[arg-type]
            world,
            rank,
            shuffle,
            seed,
            drop_last,
        )
        own.set_epoch(epoch)
        torchs.set_epoch(epoch)
        if drop_last and length < world:
            assert list(own) == []  # torch's fails
        else:
            assert list(own) == list(torchs)
            assert len(own) == len(torchs)


worlds = st.lists(st.tuples(world_sizes, batch_sizes, st.integers(0, 6)), max_size=6)
"""Number of ranks, samples per rank and step, steps until the world changes."""


@given(lengths, worlds, world_sizes, batch_sizes, seeds, st.booleans())
def test_an_epoch_in_changing_worlds_uses_every_sample_once(
    length: int,
    worlds: list[tuple[int, int, int]],
    last_world: int,
    last_batch: int,
    seed: int,
    drop_last: bool,
) -> None:
    used: list[int] = []
    state: State | None = None
    for world, batch_size, steps in worlds:
        ranks = samplers(world, length, state, seed=seed, drop_last=drop_last)
        used += train(ranks, batch_size, steps)
        state = ranks[0].state_dict()
    ranks = samplers(last_world, length, state, seed=seed, drop_last=drop_last)
    used += train(ranks, last_batch)

    largest = max(last_world, *(world for world, _, _ in worlds), 0)
    times = Counter(used)
    if drop_last:
        assert set(times.values()) <= {1}
        assert length - len(times) < largest
    else:
        assert set(times) == set(range(length))
        assert len(used) - length < largest


@given(lengths, world_sizes, world_sizes, batch_sizes, st.integers(0, 10), st.integers(1, 10))
def test_after_a_crash_exactly_the_samples_since_the_restored_state_are_used_again(
    length: int, before: int, after: int, batch_size: int, saved: int, lost: int
) -> None:
    ranks = samplers(before, length, None)
    kept = train(ranks, batch_size, saved)
    state = ranks[0].state_dict()
    repeated = train(ranks, batch_size, lost)

    rest = train(samplers(after, length, state), batch_size)

    assert set(kept) | set(rest) == set(range(length))
    assert set(repeated) - set(kept) <= set(rest)
    assert len(kept) + len(rest) < length + max(before, after)


def test_epochs_follow_each_other() -> None:
    ranks = samplers(2, 10, None, seed=3)
    first = train(ranks, 2)
    second = train(ranks, 2)  # without set_epoch
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert ranks[0].epoch == 1

    for sampler in ranks:
        sampler.set_epoch(1)  # it is complete
    assert train(ranks, 2) == []
    for sampler in ranks:
        sampler.set_epoch(2)
    assert sorted(train(ranks, 2)) == list(range(10))


def test_a_state_of_a_complete_epoch_continues_with_the_next() -> None:
    ranks = samplers(2, 10, None)
    train(ranks, 5)
    state = ranks[0].state_dict()
    assert (state["epoch"], state["samples_finished"]) == (0, 10)

    resumed = ElasticSampler(range(10), 1, 0)
    resumed.load_state_dict(state)
    assert sorted(train([resumed], 5)) == list(range(10))
    assert resumed.epoch == 1

    resumed.load_state_dict(state)
    resumed.set_epoch(0)
    assert len(resumed) == 0
    assert train([resumed], 5) == []


@pytest.mark.parametrize("persistent", [False, True])
def test_samples_that_a_loader_fetched_ahead_do_not_count(persistent: bool) -> None:
    sampler = ElasticSampler(range(60), 1, 0)
    loader = loader_of(range(60), 5, sampler=sampler, workers=2, persistent_workers=persistent)
    assert len(loader) == 12
    used: list[int] = []
    batches = iter(loader)
    for _ in range(3):
        batch = next(batches)
        used += batch.tolist()
        sampler.advance(len(batch))
        assert len(loader) == 12, "the length of a pass does not change while it runs"
    assert sampler.samples_finished == 15

    resumed = ElasticSampler(range(60), 1, 0)
    resumed.load_state_dict(sampler.state_dict())
    assert len(resumed) == 45
    used += list(resumed)
    assert sorted(used) == list(range(60))
    if persistent:  # the same loader serves the next epoch
        rest = sum((len(batch) for batch in batches), 0)
        assert rest == 45
        sampler.set_epoch(1)
        assert sorted(itertools.chain.from_iterable(batch.tolist() for batch in loader)) == list(range(60))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batches", [False, True])
def test_an_epoch_left_early_continues_whatever_the_loader_fetched(workers: int, batches: bool) -> None:
    """With two workers, the loader has fetched all samples before the first step is finished."""
    sampler: ElasticSampler | ElasticBatchSampler
    if batches:
        sampler = ElasticBatchSampler(range(8), batch_size=2, num_replicas=1, rank=0, shuffle=False)
        loader = loader_of(range(8), batch_sampler=sampler, workers=workers)
    else:
        sampler = ElasticSampler(range(8), 1, 0, shuffle=False)
        loader = loader_of(range(8), 2, sampler=sampler, workers=workers)

    def steps(most: int) -> list[int]:
        used: list[int] = []
        for batch in itertools.islice(loader, most):
            used += batch.tolist()
            sampler.advance(*([] if batches else [len(batch)]))
        return used

    assert steps(2) == [0, 1, 2, 3]
    assert sampler.state_dict()["samples_finished"] == 4
    if isinstance(sampler, ElasticBatchSampler):
        assert len(list(sampler.micro_batches())) == 2
    assert steps(9) == [4, 5, 6, 7]
    assert sampler.epoch == 0
    assert steps(9) == [*range(8)]
    assert sampler.epoch == 1


def test_an_epoch_ends_with_what_the_loader_leaves_out() -> None:
    sampler = ElasticSampler(range(10), 1, 0, shuffle=False)
    loader = DataLoader(range(10), 4, sampler=sampler, drop_last=True)  # type: ignore[arg-type]
    for epoch in range(2):
        used: list[int] = []
        for batch in loader:
            used += batch.tolist()
            sampler.advance(len(batch))
        assert (sampler.epoch, used) == (epoch, [*range(8)])


# -- batches ------------------------------------------------------------------------------------


def batch_samplers(world: int, length: int, state: State | None, **options: Any) -> list[ElasticBatchSampler]:
    options["num_replicas"] = world
    return loaded([ElasticBatchSampler(range(length), rank=rank, **options) for rank in range(world)], state)


def steps_of(ranks: list[ElasticBatchSampler]) -> Iterator[dict[int, float]]:
    """For each optimizer step, its samples and the weight of each sample's loss in the averaged gradient."""
    world = len(ranks)
    counts = [len(sampler) for sampler in ranks]
    described = [sampler.micro_batches() for sampler in ranks]
    passes = [zip(sampler, micro, strict=True) for sampler, micro in zip(ranks, described, strict=True)]
    weights: dict[int, float] = {}
    yielded = 0
    for row in zip(*passes, strict=True):  # strict: as many on every rank
        yielded += 1
        for batch, micro in row:
            assert len(batch) == max(micro.samples, 1)
            if not micro.samples:
                assert micro.weight == 0
            for index in batch[: micro.samples]:
                assert index not in weights
                weights[index] = micro.weight / micro.samples / world
        ends = {micro.completes_step for _, micro in row}
        assert len(ends) == 1
        if ends == {True}:
            for sampler in ranks:
                sampler.advance()
            yield weights
            weights = {}
    assert not weights
    assert counts == [yielded] * world


modes = st.one_of(
    st.builds(lambda size: {"global_batch_size": size}, st.integers(1, 40)),
    st.builds(lambda size: {"batch_size": size}, st.integers(1, 8)),
    st.builds(lambda sizes: {"batch_size": sizes}, st.lists(st.integers(1, 8), min_size=9, max_size=9)),
)


def for_world(mode: dict[str, Any], world: int) -> dict[str, Any]:
    sizes = mode.get("batch_size")
    return {"batch_size": sizes[:world]} if isinstance(sizes, list) else mode


@settings(max_examples=200)
@given(
    lengths,
    st.lists(st.tuples(world_sizes, modes, st.integers(0, 5)), max_size=5),
    st.tuples(world_sizes, modes),
    st.none() | st.integers(1, 9),
)
def test_batches_in_changing_worlds_use_every_sample_once_with_its_exact_weight(
    length: int,
    worlds: list[tuple[int, dict[str, Any], int]],
    last: tuple[int, dict[str, Any]],
    micro_batch_size: int | None,
) -> None:
    used: list[int] = []
    state: State | None = None
    for world, mode, steps in [*worlds, (*last, None)]:
        ranks = batch_samplers(
            world, length, state, micro_batch_size=micro_batch_size, **for_world(mode, world)
        )
        for weights in itertools.islice(steps_of(ranks), steps):
            assert list(weights.values()) == pytest.approx([1 / len(weights)] * len(weights))
            assert len(weights) == min(ranks[0].global_batch_size, length - len(used))
            used += weights
        state = ranks[0].state_dict()
    assert sorted(used) == list(range(length))


@given(lengths, st.integers(1, 40), st.lists(world_sizes, min_size=2, max_size=2), seeds, st.booleans())
def test_a_constant_global_batch_has_the_same_samples_in_every_world(
    length: int, size: int, worlds: list[int], seed: int, drop_last: bool
) -> None:
    if drop_last:
        length = max(length, size)
    options = {"global_batch_size": size, "seed": seed, "drop_last": drop_last}
    steps = [
        [sorted(weights) for weights in steps_of(batch_samplers(world, length, None, **options))]
        for world in worlds
    ]
    assert steps[0] == steps[1]
    assert len(steps[0]) == (length // size if drop_last else -(-length // size))


@given(lengths, world_sizes, batch_sizes, seeds)
def test_equal_batches_are_those_of_the_sampler(length: int, world: int, batch_size: int, seed: int) -> None:
    for rank in range(world):
        batches = ElasticBatchSampler(
            range(length), batch_size=batch_size, num_replicas=world, rank=rank, seed=seed
        )
        sampler = ElasticSampler(range(length), world, rank, seed=seed)
        own = list(sampler)
        full = length // (batch_size * world)
        assert list(batches)[:full] == [
            own[step * batch_size : (step + 1) * batch_size] for step in range(full)
        ]


# -- mistakes -----------------------------------------------------------------------------------


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def test_a_dataset_without_length_is_rejected() -> None:
    with pytest.raises(TypeError, match=r"a dataset of type Endless has no length; expected one with"):
        ElasticSampler(Endless(), 1, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 99}, "the checkpoint has length=99, expected 10 as in this sampler"),
        ({"shuffle": False}, "the checkpoint has shuffle=False, expected True"),
        ({"epoch": None}, "epoch not in "),
    ],
)
def test_a_state_that_does_not_fit_is_rejected(change: State, message: str) -> None:
    sampler = ElasticSampler(range(10), 1, 0)
    state = {name: value for name, value in {**sampler.state_dict(), **change}.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict(state)


def test_the_seed_of_the_checkpoint_is_used() -> None:
    first = ElasticSampler(range(100), 1, 0, seed=1)
    head = list(itertools.islice(first, 40))
    first.advance(40)
    second = ElasticSampler(range(100), 1, 0, seed=2)
    second.load_state_dict(first.state_dict())
    assert sorted([*head, *second]) == list(range(100))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected exactly one of them"),
        ({"batch_size": 4, "global_batch_size": 8}, "expected exactly one of them"),
        ({"global_batch_size": 0}, "global_batch_size=0; expected at least 1"),
        ({"batch_size": [4, 4, 4]}, "expected at least 1 for each of the 2 ranks"),
        ({"batch_size": 4, "micro_batch_size": 0}, "micro_batch_size=0; expected at least 1"),
        ({"global_batch_size": 64, "drop_last": True}, "expected at least one full step"),
        ({"batch_size": 4, "rank": 2}, "rank=2; expected 0 to 1, as num_replicas=2"),
    ],
)
def test_sizes_that_do_not_fit_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ElasticBatchSampler(range(50), **{"num_replicas": 2, "rank": 0, **options})


def test_ranks_are_those_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before the process group is initialised."""
    placement = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**placement, "GROUP_RANK": "2", "GROUP_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ELASTIC_AGENT_GENERATION", raising=False)
    sampler = ElasticSampler(range(9), shuffle=False)
    assert list(sampler) == [2, 5, 8]
    assert list(ElasticBatchSampler(range(9), batch_size=2, shuffle=False)) == [[2, 5], [8]]
