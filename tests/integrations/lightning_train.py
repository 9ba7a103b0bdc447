"""A Lightning script as people write them, which knows nothing of elastic-agent. It writes down what it does.

Its numbers of devices and nodes are wrong in every world of the tests.
"""

from __future__ import annotations

from notes import note  # isort: skip

import argparse
import os
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):  # type: ignore[type-arg]
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([index / self.count]), index


class Line(lightning.LightningModule):
    def __init__(self, folder: Path, pause: float, save_at: int | None) -> None:
        super().__init__()
        self.save_at = save_at
        self.folder = folder
        self.pause = pause
        self.layer = torch.nn.Linear(1, 1)
        self.ids: list[int] = []
        self.noted = 0

    def note(self, kind: str, **more: object) -> None:
        trainer = self.trainer
        place = {"rank": trainer.global_rank, "epoch": trainer.current_epoch, "step": trainer.global_step}
        note(self.folder, kind, **{**place, **more})

    def on_train_start(self) -> None:
        strategy = self.trainer.strategy
        self.noted = self.trainer.global_step
        self.note("born", strategy=type(strategy).__name__)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        values, ids = batch
        time.sleep(self.pause)
        self.ids += ids.tolist()
        return (self.layer(values) - 2 * values).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == self.noted:  # gradients are being accumulated
            return
        self.note("step", ids=self.ids, weights=[parameter.item() for parameter in self.parameters()])
        self.ids, self.noted = [], self.trainer.global_step
        if self.trainer.global_step == self.save_at:
            self.trainer.save_checkpoint(self.folder / "early.ckpt")
        finish = (self.folder / "finish").exists()
        if self.trainer.strategy.reduce_boolean_decision(finish, all=False):
            self.trainer.should_stop = True

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", (self.layer(batch[0]) - 2 * batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=1800)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--samples-per-step", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=10**6)
    parser.add_argument("--save-at", type=int, metavar="STEP")
    options = parser.parse_args()
    lightning.seed_everything(1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=3,
        num_nodes=5,
        max_epochs=options.epochs,
        default_root_dir=options.folder,
        logger=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        accumulate_grad_batches=options.samples_per_step // (2 * int(os.environ["WORLD_SIZE"])),
    )
    trainer.fit(
        Line(options.folder, options.pause, options.save_at),
        DataLoader(Numbers(options.samples), batch_size=2, shuffle=True),
        DataLoader(Numbers(8), batch_size=4),
    )


if __name__ == "__main__":
    main()
