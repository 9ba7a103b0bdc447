"""A LightlyTrain script as people write it, which knows nothing of elastic-agent. Hooks of torch note what it does."""

from __future__ import annotations

from notes import note  # isort: skip

import argparse
import os
from pathlib import Path
from typing import Any

import lightly_train
import torch
from PIL import Image
from torch.optim.optimizer import register_optimizer_step_post_hook

IMAGES = 24


def note_steps(folder: Path) -> None:
    """Note the number of each step, as the optimizer counts them."""

    def step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        number = int(next(iter(optimizer.state.values()))["step"])
        note(folder, "step", rank=int(os.environ["RANK"]), step=number)
        if (folder / "finish").exists() and number % 5 == 0:
            os._exit(0)

    register_optimizer_step_post_hook(step)
    note(folder, "born", rank=int(os.environ["RANK"]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    images = options.folder / "images"
    images.mkdir(exist_ok=True)
    for number in range(IMAGES):
        partial = options.folder / f"{os.getpid()}-{number}.png"
        Image.new("RGB", (48, 48), (number * 10, 80, 160)).save(partial)
        partial.replace(images / f"{number}.png")
    note_steps(options.folder)
    lightly_train.pretrain(
        out=options.folder / "out",
        data=images,
        model="torchvision/resnet18",
        method="simclr",
        optim="adamw",
        epochs=100_000,
        batch_size=8,
        num_workers=0,
        accelerator="cpu",
        devices=3,
        num_nodes=5,
        transform_args={"image_size": (32, 32)},
    )


if __name__ == "__main__":
    main()
