"""Trains with DDP and continues after a failure from memory, without reading its checkpoint.

    elastic-agent --nproc-per-node 2 examples/survive_ddp.py --fail-at 50

Also runs under torchrun and plain python. With several machines, pass a shared folder as --checkpoint-dir.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastic_agent import client, survive
from elastic_agent.data import ElasticBatchSampler

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--checkpoint-dir", type=Path, default=Path())
parser.add_argument("--checkpoint-every", type=int, default=20, metavar="STEPS")
parser.add_argument("--fail-at", type=int, metavar="STEP", help="raise an exception, in the first generation")
options = parser.parse_args()
me = client.current()
checkpoint = options.checkpoint_dir / f"{me.run_id}.pt"
torch.manual_seed(0)
x = torch.randn(4096, 16)
dataset = TensorDataset(x, x.sin().sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
sampler = ElasticBatchSampler(dataset, global_batch_size=64)
state = survive.State(model=model, optimizer=optimizer, sampler=sampler)
state.load(checkpoint)


@survive.train(state)
def train(world: survive.World) -> None:
    ddp = world.ddp(model)
    while state.step < options.steps:
        for inputs, targets in DataLoader(dataset, batch_sampler=sampler):
            loss = nn.functional.mse_loss(ddp(inputs), targets)
            loss.backward()
            if state.step == options.fail_at and me.placement.first_generation:
                raise RuntimeError("an error to recover from")
            optimizer.step()
            optimizer.zero_grad()
            sampler.advance()
            state.step += 1
            if world.rank == 0:
                print(f"step={state.step} loss={loss.item():.6f}", flush=True)
            if state.step % options.checkpoint_every == 0:
                state.save(checkpoint)
            if state.step == options.steps:
                break


train()
