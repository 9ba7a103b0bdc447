"""Training with Lightning's Trainer, as its documentation has it: two nodes with two workers each."""

from events import FOLDER, Rounds  # isort: skip

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, number):
        x, y = batch
        return nn.functional.cross_entropy(self.network(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Record(Callback):
    def on_train_start(self, trainer, module) -> None:
        self.rounds = Rounds()

    def on_train_batch_end(self, trainer, module, outputs, batch, number) -> None:
        self.rounds.done()


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        num_nodes=2,
        strategy="ddp",
        max_epochs=-1,
        default_root_dir=FOLDER / "lightning",
        callbacks=[Record(), ModelCheckpoint(FOLDER / "lightning", every_n_train_steps=100, save_last=True)],
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Digits(), DataLoader(data, batch_size=16, shuffle=True), ckpt_path="last")


if __name__ == "__main__":
    main()
