"""A Fabric script as people write them, which knows nothing of elastic-agent. It writes down what it does."""

from __future__ import annotations

from notes import note  # isort: skip

import argparse
import time
from pathlib import Path

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--every", type=int, required=True, help="steps between two checkpoints")
    options = parser.parse_args()
    folder = options.folder
    checkpoint = folder / "state.ckpt"

    fabric = lightning.Fabric(accelerator="cpu", devices=3, num_nodes=5)
    fabric.launch()
    fabric.seed_everything(1)
    layer = torch.nn.Linear(1, 1)
    model, optimizer = fabric.setup(layer, torch.optim.Adam(layer.parameters(), lr=0.01))
    numbers = torch.arange(64).unsqueeze(1) / 64
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(numbers), batch_size=4, shuffle=True))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if checkpoint.exists():
        fabric.load(checkpoint, state)
    note(folder, "born", rank=fabric.global_rank, step=state["step"], batches=len(loader))

    done = False
    while not done:
        for (x,) in loader:
            time.sleep(0.05)
            optimizer.zero_grad()
            fabric.backward((model(x) - 2 * x).square().mean())
            optimizer.step()
            state["step"] += 1
            note(folder, "step", rank=fabric.global_rank, step=state["step"])
            if state["step"] % options.every == 0:
                fabric.save(checkpoint, state)
            done = bool(fabric.all_reduce(torch.tensor(float((folder / "finish").exists())), reduce_op="sum"))
            if done:
                break


if __name__ == "__main__":
    main()
