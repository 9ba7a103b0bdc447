"""The position in the training data of a Lightning script, restored in another world."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from elastic_agent.integrations.lightning.samples import Samples

TWO = [{"num_replicas": 2, "rank": rank} for rank in range(2)]


def loader(*, shuffle: bool) -> DataLoader[int]:
    return DataLoader([*range(10)], batch_size=2, shuffle=shuffle)  # type: ignore[arg-type]


def order(samples: Samples, own: DataLoader[int], world: dict[str, int] | None, epoch: int = 3) -> list[int]:
    """Of the loader's samples. Lightning asks for a random order whenever it trains."""
    sampler: Any = samples.sampler_for(own, shuffle=True, epoch=epoch, world=world)
    return [*(own.batch_sampler.sampler if sampler is None else sampler)]  # type: ignore[union-attr]


def test_an_epoch_that_began_in_order_on_one_worker_continues_on_one_and_on_two() -> None:
    alone = Samples({})
    assert order(alone, loader(shuffle=False), None) == [*range(10)]
    alone.step_done()
    state = alone.state()
    again, own = Samples({"sampler": state}), loader(shuffle=False)
    assert order(again, own, None) == [*range(2, 10)]
    assert again.continued
    again.release()
    assert own.batch_sampler.sampler is own.sampler  # type: ignore[union-attr]
    together = [Samples({"sampler": state}) for _ in TWO]
    parts = [
        samples.sampler_for(loader(shuffle=False), shuffle=True, epoch=3, world=world)
        for samples, world in zip(together, TWO, strict=True)
    ]
    assert [[*part] for part in parts if part is not None] == [[2, 4, 6, 8], [3, 5, 7, 9]]
    for part in parts:
        assert part is not None
        part.set_epoch(4)
    shuffled = sorted(sample for part in parts if part is not None for sample in part)
    assert shuffled == [*range(10)]
    assert [*parts[0]][:2] != [0, 2], "the next epoch is in random order, as without elastic-agent"  # type: ignore[misc]


def test_one_worker_keeps_the_scripts_own_random_order() -> None:
    torch.manual_seed(7)
    plain = [*loader(shuffle=True).sampler]
    torch.manual_seed(7)
    alone = Samples({})
    assert order(alone, loader(shuffle=True), None) == plain
    alone.step_done()
    assert alone.state() is None, "its position is not known"


def test_an_epoch_that_began_on_two_workers_continues_in_its_order_on_one() -> None:
    together = Samples({})
    whole = order(together, loader(shuffle=True), TWO[0])
    together.step_done()
    alone = Samples({"sampler": together.state()})
    rest = order(alone, loader(shuffle=True), None)
    assert rest[0] == whole[2]
    assert len(rest) == 6
    assert alone.continued


def test_a_position_in_other_data_is_not_used() -> None:
    alone = Samples({})
    order(alone, loader(shuffle=False), None)
    alone.step_done()
    changed = Samples({"sampler": {**(alone.state() or {}), "length": 9}})
    assert len(order(changed, loader(shuffle=False), None)) == 10
    assert "length=9, expected 10" in changed.refusal
