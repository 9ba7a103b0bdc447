"""Trains a small network on scikit-learn's handwritten digits with Lightning. Nothing in it concerns elastic-agent.

    python examples/lightning_digits.py
    elastic-agent --rdzv-endpoint host0:29400 --nnodes 1:4 --nproc-per-node 2 \\
        examples/lightning_digits.py --root /shared/digits

Under elastic-agent, it continues after every change of the world; see docs/script.md.
"""

from __future__ import annotations

import argparse
import sys

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

TEST_IMAGES = 360


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        correct = (self.network(images).argmax(1) == labels).float().mean()
        self.log("accuracy", correct, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="lightning_digits", help="folder for checkpoints and logs")
    parser.add_argument("--epochs", type=int, default=40)
    options = parser.parse_args()

    lightning.seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    train = torch.utils.data.Subset(data, order[TEST_IMAGES:])
    test = torch.utils.data.Subset(data, order[:TEST_IMAGES])

    trainer = lightning.Trainer(
        max_epochs=options.epochs, default_root_dir=options.root, log_every_n_steps=10
    )
    trainer.fit(Digits(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=32))
    accuracy = trainer.callback_metrics["accuracy"].item()
    if trainer.is_global_zero:
        print(f"done: accuracy {accuracy:.4f} after {trainer.global_step} steps")
    return 0 if accuracy > 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
