"""Trains with DDP and makes none of the mistakes that test_chaos.py puts into it."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elastic_agent import client

STEPS = int(sys.argv[2])

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(24, 4)
targets = inputs.sum(1, keepdim=True) + 0.1 * torch.randn(24, 1)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
path = os.path.join(sys.argv[1], "model.pt")
first = 0
if os.path.exists(path):
    state = torch.load(path, weights_only=True)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]


def save(done):
    if rank == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
        torch.save(state, path + ".new")
        os.replace(path + ".new", path)


agreement = client.Agreement()
for step in range(first, STEPS):
    loss = torch.nn.functional.mse_loss(model(inputs[rank::world]), targets[rank::world])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.05)  # a larger model
    if (step + 1) % 5 == 0:
        save(step + 1)
    if agreement.notice():
        save(step + 1)
        dist.barrier()
        client.leave()

dist.barrier()
dist.destroy_process_group()
