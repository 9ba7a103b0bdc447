"""Keeps the state of a training in memory while its processes are restarted.

    from elastic_agent import survive

    state = survive.State(model=model, optimizer=optimizer, sampler=sampler)
    state.load("checkpoint.pt")                # optional, and read only if no worker has a newer state

    @survive.train(state)
    def train(world):
        ddp = world.ddp(model)
        while state.step < steps:
            loss(ddp(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
            state.step += 1                    # from here on this step counts

    train()

elastic-agent holds the memory. When a worker fails, all workers are started again, agree on which of them has the
newest state, and continue with it; no checkpoint is read while one agent of the run lives. Under ``torchrun`` and plain
``python`` the same script runs, and begins with its checkpoint. Importing this package imports torch.
"""

from elastic_agent.survive._state import State
from elastic_agent.survive._train import World, train

__all__ = ["State", "World", "train"]
