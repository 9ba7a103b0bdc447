"""Trains with Accelerate and uses each sample exactly once per epoch, while nodes join and leave.

    elastic-agent --rdzv-endpoint host0:29400 --nnodes 1:4 --nproc-per-node 2 examples/accelerate_train.py

Also runs under torchrun, `accelerate launch` and plain python. With several machines, --checkpoint-dir must be a folder
that they share.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastic_agent import client
from elastic_agent.data import ElasticSampler


def main() -> None:
    options = parse_arguments()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(options.samples, 16)
    dataset = TensorDataset(x, x.sin().sum(dim=1, keepdim=True))
    # Accelerate divides the batches among the workers, so the sampler is that of a single worker.
    sampler = ElasticSampler(dataset, num_replicas=1, rank=0)
    loader = DataLoader(dataset, batch_size=options.batch_size, sampler=sampler)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(sampler)

    folder = options.checkpoint_dir / client.current().run_id
    saved = sorted(folder.glob("checkpoint-*"))
    if saved:
        accelerator.load_state(str(saved[-1]))
    agreement = client.Agreement()
    for epoch in range(sampler.epoch, options.epochs):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            sampler.advance(loader.total_batch_size)
            client.heartbeat()
            if accelerator.is_main_process:
                print(f"epoch={epoch} samples={sampler.samples_finished} loss={loss.item():.4f}", flush=True)
            if agreement.notice() is not None:  # the workers will be stopped: the same step on every rank
                save(accelerator, folder, sampler)
                client.leave()
        save(accelerator, folder, sampler)
    accelerator.end_training()


def save(accelerator: Accelerator, folder: Path, sampler: ElasticSampler) -> None:
    """Save a checkpoint and then remove the older ones: at any time, there is a complete one."""
    new = folder / "new"
    accelerator.save_state(str(new))  # every rank writes its own random state
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        older = list(folder.glob("checkpoint-*"))
        new.rename(folder / f"checkpoint-{sampler.epoch:04}-{sampler.samples_finished:012}")
        for checkpoint in older:
            shutil.rmtree(checkpoint)
    accelerator.wait_for_everyone()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"))
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8, help="samples per worker and step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
