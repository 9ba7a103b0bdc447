"""The position in the training data of a Lightning script, restored in another world."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from elastic_agent.integrations.lightning.samples import Samples


def loader(*, shuffle: bool, generator: torch.Generator | None = None) -> DataLoader[int]:
    return DataLoader([*range(10)], batch_size=2, shuffle=shuffle, generator=generator)  # type: ignore[arg-type]


def order(samples: Samples, own: DataLoader[int], world: dict[str, int] | None) -> list[int]:
    """Of the loader's samples. Lightning asks for a random order whenever it trains."""
    sampler: Any = samples.sampler_for(own, shuffle=True, epoch=3, world=world)
    return [*(own.batch_sampler.sampler if sampler is None else sampler)]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["in order", "random", "generator"])
def test_an_epoch_that_began_on_one_worker_continues_in_its_order_on_one_and_on_two(kind: str) -> None:
    def made() -> DataLoader[int]:
        generator = torch.Generator().manual_seed(5) if kind == "generator" else None
        torch.manual_seed(7)
        return loader(shuffle=kind != "in order", generator=generator)

    plain = [*made().sampler]
    alone, own = Samples({}), made()
    assert order(alone, own, None) == plain, "as without elastic-agent"
    alone.step_done()
    state = alone.state()
    again, own = Samples({"sampler": state}), made()
    before = torch.get_rng_state()
    assert order(again, own, None) == plain[2:]
    assert again.continued
    assert torch.equal(before, torch.get_rng_state())
    two = [order(Samples({"sampler": state}), made(), {"num_replicas": 2, "rank": rank}) for rank in range(2)]
    assert two == [plain[2::2], plain[3::2]]
    again.release()
    assert own.batch_sampler.sampler is own.sampler  # type: ignore[union-attr]


def test_an_epoch_that_began_on_two_workers_continues_in_its_order_on_one() -> None:
    world = {"num_replicas": 2, "rank": 0}
    together = Samples({})
    whole = order(together, loader(shuffle=True), world)
    together.step_done()
    alone, own = Samples({"sampler": together.state()}), loader(shuffle=True)
    rest = order(alone, own, None)
    assert rest[0] == whole[2]
    assert len(rest) == 6
    sampler: Any = own.batch_sampler.sampler  # type: ignore[union-attr]
    sampler.set_epoch(4)
    torch.manual_seed(1)
    next_epoch = [*sampler]
    torch.manual_seed(1)
    assert next_epoch == [*own.sampler], "the script's own order"


def test_a_position_in_other_data_is_not_used() -> None:
    alone = Samples({})
    order(alone, loader(shuffle=True), None)
    alone.step_done()
    changed = Samples({"sampler": {**(alone.state() or {}), "length": 9}})
    assert len(order(changed, loader(shuffle=True), None)) == 10
    assert "length=9, shuffle=True, expected length=10, shuffle=True" in changed.refusal
