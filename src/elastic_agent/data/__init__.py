"""Samplers for training in a world that changes: each sample is used exactly once per epoch.

    sampler = ElasticSampler(dataset)                       # instead of DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    sampler.load_state_dict(checkpoint["sampler"])          # if there is a checkpoint
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            train_step(x, y)
            sampler.advance(len(x))                         # this step is finished on all ranks

:class:`ElasticSampler` gives single samples, like torch's ``DistributedSampler``. :class:`ElasticBatchSampler` gives
batches, and can keep the number of samples per optimizer step constant when the number of workers changes.

Both work under any launcher. Their state (:meth:`~ElasticSampler.state_dict`) is the same on every rank and does not
depend on the number of ranks.
"""

from elastic_agent.data._batch_sampler import ElasticBatchSampler, MicroBatch
from elastic_agent.data._sampler import ElasticSampler

__all__ = ["ElasticBatchSampler", "ElasticSampler", "MicroBatch"]
