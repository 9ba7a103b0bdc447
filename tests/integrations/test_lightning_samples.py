"""The position in the training data of a Lightning script, restored in another world."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from elastic_agent.integrations.lightning.samples import EpochSampler, Samples


def sampler(samples: Samples, world: dict[str, int] | None) -> EpochSampler:
    """Of a loader that does not shuffle; Lightning asks for a random order whenever it trains."""
    loader: Any = DataLoader([*range(10)], batch_size=2)  # type: ignore[arg-type]
    found = samples.sampler_for(loader, shuffle=True, epoch=3, world=world)
    assert found is not None
    return found


def test_an_epoch_that_began_on_one_worker_continues_in_its_order_on_two() -> None:
    alone = Samples({})
    assert [*sampler(alone, None)] == [*range(10)]
    alone.step_done()
    ranks = []
    for rank in range(2):
        samples = Samples({"sampler": alone.state()})
        ranks.append(sampler(samples, {"num_replicas": 2, "rank": rank}))
        assert samples.continued, samples.refusal
    assert [[*one] for one in ranks] == [[2, 4, 6, 8], [3, 5, 7, 9]]
    ranks[0].set_epoch(4)
    assert ranks[0].shuffle, "the next epoch has the order that Lightning uses with two workers"
