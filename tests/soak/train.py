"""Trains so that the result depends neither on the number of workers nor on restarts, to the last bit.

    python train.py FOLDER PACE_S LAST

Each step has a batch of its own, whose samples are divided among the ranks. The gradients of single samples are
rounded to integers and summed as such, so that the order of the summands does not matter. Ends after step LAST; if that
is 0, when ``FOLDER/finish`` exists.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

from elastic_agent import client

SCALE = 2.0**36
BATCH, FEATURES, HIDDEN = 8, 6, 8
SAVE_EVERY = 10

folder, pace_s, last = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = torch.nn.Sequential(torch.nn.Linear(FEATURES, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
parameters = [*model.parameters()]
sizes = [parameter.numel() for parameter in parameters]
path = os.path.join(folder, "model.pt")
done = 0
if os.path.exists(path):
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    done = state["step"]


def save(loss):
    if rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done, "loss": loss}
        torch.save(state, path + ".new")
        os.replace(path + ".new", path)


def gradients_and_loss(step):
    """Of this rank's samples, summed, as integers."""
    batch = torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(step))
    total = torch.zeros(sum(sizes) + 2, dtype=torch.int64)
    for sample in range(rank, BATCH, world):
        inputs = batch[sample : sample + 1]
        loss = (model(inputs) - inputs.sin().sum()).square().mean()
        found = [gradient.reshape(-1) for gradient in torch.autograd.grad(loss, parameters)]
        total[:-1] += (torch.cat([*found, loss.reshape(1)]) * SCALE).round().to(torch.int64)
    return total


agreement = client.Agreement()
ends = False
while not ends:
    total = gradients_and_loss(done)
    if rank == 0 and (done + 1 == last if last else os.path.exists(os.path.join(folder, "finish"))):
        total[-1] = 1
    dist.all_reduce(total)
    ends = bool(total[-1])
    mean = total[:-1].to(torch.float64) / (SCALE * BATCH)
    # Only what is observed sees this: the loss of a step is the scalar that backward() is called on.
    mean[-1].clone().requires_grad_().backward()
    for parameter, gradient in zip(parameters, mean[:-1].split(sizes), strict=True):
        parameter.grad = gradient.view_as(parameter).clone()
    optimizer.step()
    done += 1
    time.sleep(pace_s)
    if done % SAVE_EVERY == 0 or ends:
        save(mean[-1].item())
    if agreement.notice() and not ends:
        save(mean[-1].item())
        dist.barrier()
        client.leave()

dist.barrier()
dist.destroy_process_group()
