"""The position in an epoch, with batches divided among the ranks by Accelerate as for a Trainer, and in checkpoints."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from elastic_agent.data import ElasticSampler
from elastic_agent.integrations.transformers.position import STATE_FILE, Position, saved, trainer_state


@dataclass
class Rank:
    """What the integration uses of a rank's prepared data loader."""

    length: int
    batch_size: int
    world: int
    rank: int
    sampler: ElasticSampler = field(init=False)

    def __post_init__(self) -> None:
        self.sampler = ElasticSampler(range(self.length), 1, 0)
        batches = BatchSampler(self.sampler, self.batch_size, drop_last=False)
        self.shard = BatchSamplerShard(batches, self.world, self.rank)
        self.total_batch_size = self.batch_size * self.world
        self.position = Position(self.sampler)
        self.position.use(self)

    def __len__(self) -> int:
        return len(self.shard)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.shard)


worlds = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 6)), max_size=5
)
"""Ranks, samples per batch, batches per optimizer step, and optimizer steps until the world changes."""


@given(st.integers(1, 150), worlds)
def test_the_rest_of_an_epoch_is_divided_into_whole_steps_of_each_world(
    length: int, worlds: list[tuple[int, int, int, int]]
) -> None:
    used: list[int] = []
    state: dict[str, Any] | None = None
    for world, batch_size, accumulation, steps in [*worlds, (1, 2, 2, 10**6)]:
        ranks = [Rank(length, batch_size, world, rank) for rank in range(world)]
        whole = len(ranks[0])
        rests = [rank.position.restore(state, rank, accumulation) for rank in ranks] if state else []
        batches_left = len(ranks[0])
        if rests:
            assert rests == [rests[0]] * world
            if rests[0].epoch > 0:
                break
            assert rests[0].batches_done % accumulation == 0
            assert rests[0].batches_in_epoch == rests[0].batches_done + batches_left
            assert rests[0].steps_in_epoch == -(-rests[0].batches_in_epoch // accumulation)
            assert rests[0].steps_in_epoch == -(-whole // accumulation)
        passes = [iter(rank) for rank in ranks]
        for _ in range(steps):
            rows = list(itertools.islice(zip(*passes, strict=True), accumulation))
            if not rows:
                break
            used += [index for row in rows for batch in row for index in batch]
            for rank in ranks:
                rank.position.advance(len(rows))
        state = ranks[0].position.state_dict()
        assert state["samples_finished"] == len({*used})
    assert {*used} == {*range(length)}
    largest_step = max((world * batch_size for world, batch_size, _, _ in worlds), default=1)
    assert len(used) - length < max(largest_step, 2)


@given(st.integers(1, 150), st.integers(1, 5), st.integers(1, 4), st.data())
def test_what_is_left_after_skipped_batches_is_the_rest_of_the_batches(
    length: int, world: int, batch_size: int, data: st.DataObject
) -> None:
    ranks = [Rank(length, batch_size, world, rank) for rank in range(world)]
    batches = [list(rank) for rank in ranks]
    skipped = data.draw(st.integers(0, len(batches[0]) - 1))
    left = set(range(length)) - {index for rank in batches for batch in rank[:skipped] for index in batch}
    for rank in ranks:
        rank.position.skip(0, skipped)
        rank.sampler.set_epoch(0)  # as each epoch begins
        assert len(rank) == len(batches[0]) - skipped
    assert {index for rank in ranks for batch in rank for index in batch} >= left


@pytest.mark.parametrize(
    "callbacks",
    [
        None,
        [],
        {"ElasticCallback": None},
        {"ElasticCallback": {"attributes": None}},
        {"ElasticCallback": {"attributes": {"saved": ["run"]}}},
    ],
)
def test_a_checkpoint_with_other_content_has_no_position(tmp_path: Path, callbacks: Any) -> None:
    (tmp_path / STATE_FILE).write_text(json.dumps({"stateful_callbacks": callbacks}))
    assert saved(tmp_path) == {}


@pytest.mark.parametrize("content", [b'{"stateful_\xff', b"", b"[]", b'{"global_step": 7, ', None])
def test_a_checkpoint_that_is_not_complete_has_no_state(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / STATE_FILE).write_bytes(content)
    assert trainer_state(tmp_path) == {}
