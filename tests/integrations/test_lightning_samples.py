"""The position in the training data of a Lightning script, restored in another world."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from elastic_agent.integrations.lightning.samples import Samples


def loader(*, shuffle: bool = True) -> DataLoader[int]:
    return DataLoader([*range(10)], batch_size=2, shuffle=shuffle)  # type: ignore[arg-type]


def begun_on_two() -> tuple[list[int], dict[str, Any]]:
    """Return all samples of an epoch in their order, and a checkpoint's part after its first step."""
    ranks = [Samples({}) for _ in range(2)]
    orders = [[*sampler_of(samples, {"num_replicas": 2, "rank": rank})] for rank, samples in enumerate(ranks)]
    ranks[0].step_done()
    whole = [sample for pair in zip(*orders, strict=True) for sample in pair]
    return whole, {"sampler": ranks[0].state()}


def sampler_of(samples: Samples, world: dict[str, int] | None, *, shuffle: bool = True) -> Any:
    """Lightning asks for a random order whenever it trains."""
    return samples.sampler_for(loader(shuffle=shuffle), shuffle=True, epoch=3, world=world)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_single_worker_keeps_the_sampler_of_the_script(shuffle: bool) -> None:
    alone = Samples({})
    assert sampler_of(alone, None, shuffle=shuffle) is None
    alone.step_done()
    assert alone.state() is None


@pytest.mark.parametrize("world", [None, {"num_replicas": 1, "rank": 0}], ids=["alone", "of one"])
def test_an_epoch_that_began_on_two_workers_continues_in_its_order_on_one(
    world: dict[str, int] | None,
) -> None:
    whole, state = begun_on_two()
    alone = Samples(state)
    assert [*sampler_of(alone, world)] == whole[4:]
    assert (alone.continued, alone.batches_done()) == (True, 2)


def test_a_position_in_other_data_is_not_used() -> None:
    whole, state = begun_on_two()
    changed = Samples({"sampler": {**state["sampler"], "length": 9}})
    assert [*sampler_of(changed, {"num_replicas": 1, "rank": 0})] == whole
    assert "the checkpoint has length=9, expected 10" in changed.refusal
