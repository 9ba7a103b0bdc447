#!/usr/bin/env bash
# Lightning 2.6.6: trainer.fit(Module(lr=0.1), ckpt_path=CHECKPOINT) of a training with lr=0.001 trains with 0.001, without
# a word, while module.hparams.lr is 0.1 and is what loggers record.
# One would guess: hyperparameters that are saved in the checkpoint are compared with those of the module, or the new ones
# count. In a sweep whose trials share a folder, a trial that resumes reports results under a rate that it did not use.
# Source: lightning/pytorch/trainer/connectors/checkpoint_connector.py, restore_optimizers.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder" && "$folder/bin/pip" install --quiet torch==2.13.0 lightning==2.6.6
"$folder/bin/python" - "$folder" 2> "$folder/stderr" <<'PYTHON'
import sys

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(1, 1)
        self.rates = set()

    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()

    def on_train_batch_end(self, *_):
        self.rates.add(self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def fit(lr, epochs, checkpoint=None):
    module = Module(lr)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=sys.argv[1],
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2), ckpt_path=checkpoint)
    trainer.save_checkpoint(f"{sys.argv[1]}/saved.ckpt")
    return module


fit(0.001, 1)
module = fit(0.1, 2, f"{sys.argv[1]}/saved.ckpt")
print(f"hparams.lr {module.hparams.lr}; used after the checkpoint: {module.rates}")
raise SystemExit((module.hparams.lr, module.rates) != (0.1, {0.001}))
PYTHON
