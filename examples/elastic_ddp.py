"""Trains with DDP and uses each sample exactly once per epoch, while nodes join and leave.

    elastic-agent --rdzv-endpoint host0:29400 --nnodes 1:4 --nproc-per-node 2 examples/elastic_ddp.py

Also runs under torchrun and plain python. With several machines, pass a shared folder as --checkpoint-dir.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from elastic_agent import client
from elastic_agent.data import ElasticBatchSampler


def main() -> None:
    options = parse_arguments()
    me = client.current()
    device = join_process_group(me)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    dataset = make_dataset(options.samples)
    sampler = ElasticBatchSampler(dataset, global_batch_size=options.global_batch, micro_batch_size=16)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=1, persistent_workers=True)
    parts = {"model": model, "optimizer": optimizer, "sampler": sampler}
    checkpoint = options.checkpoint_dir / f"{me.run_id}.pt"
    step = load(checkpoint, parts, device)

    # DDP rearranges its gradient buckets after its first step, and sums in another order from then on. That would make
    # the last digits depend on the number of restarts; with this argument, it does not.
    ddp = DistributedDataParallel(model, find_unused_parameters=options.reproducible)
    agreement = client.Agreement()
    for epoch in range(sampler.epoch, options.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for (x, y), micro in zip(loader, sampler.micro_batches(), strict=True):
            with contextlib.nullcontext() if micro.completes_step else ddp.no_sync():
                loss = nn.functional.mse_loss(ddp(x.to(device)), y.to(device)) * micro.weight
                loss.backward()
            total += loss.detach()
            if not micro.completes_step:
                continue
            optimizer.step()
            optimizer.zero_grad()
            sampler.advance()
            step += 1
            client.heartbeat(step)
            report(step, total)
            notice = agreement.notice()  # the workers will be stopped: the same step on every rank
            if notice is not None or step % options.checkpoint_every == 0:
                save(checkpoint, parts, step)
            if notice is not None:
                client.leave()
    save(checkpoint, parts, step)
    dist.destroy_process_group()


def load(checkpoint: Path, parts: dict[str, Any], device: torch.device) -> int:
    """Continue from the checkpoint if there is one; the number of steps taken."""
    if not checkpoint.exists():
        return 0
    state = torch.load(checkpoint, map_location=device, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return int(state["step"])


def save(checkpoint: Path, parts: dict[str, Any], step: int) -> None:
    """From rank 0, atomically: readers never see a partial checkpoint."""
    if dist.get_rank() == 0:
        new = checkpoint.with_suffix(".new")
        torch.save({"step": step, **{name: part.state_dict() for name, part in parts.items()}}, new)
        new.replace(checkpoint)


def report(step: int, total: Tensor) -> None:
    """Print the mean loss of the step over all its samples, from rank 0; starts the next sum."""
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"step={step} loss={total.item() / dist.get_world_size():.9g}", flush=True)
    total.zero_()


def make_dataset(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 16, generator=generator)
    return TensorDataset(x, x.sin().sum(dim=1, keepdim=True))


def join_process_group(me: client.Worker) -> torch.device:
    if "RANK" not in os.environ:  # plain python
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return torch.device("cpu")
    if torch.cuda.device_count() >= me.placement.local_world_size:
        device = torch.device("cuda", me.placement.local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument(
        "--global-batch", type=int, default=64, help="samples per step, of all workers together"
    )
    parser.add_argument("--checkpoint-dir", type=Path, default=Path())
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    parser.add_argument(
        "--reproducible", action="store_true", help="the same result, bit for bit, after restarts"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
