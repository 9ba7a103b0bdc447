#!/usr/bin/env bash
# Lightning 2.6.6: fit with the checkpoint of the fourth batch of an epoch of ten (ModelCheckpoint(every_n_train_steps=4))
# trains six more batches, with the right numbers, and their data are those of the first six: samples 0 to 3 are seen twice
# in this epoch, 6 to 9 never. There is a warning that results may be unreliable; it does not say which data are used.
# One would guess: the batches that are done are skipped, as transformers does it, or the epoch begins anew.
# Lightning restores how many batches are done, and leaves the position in the data to the loader, which torch's DataLoader
# does not keep. A checkpoint within each epoch and a crash after it leave the end of the data untrained each time.
# Source: lightning/pytorch/loops/training_epoch_loop.py, _TrainingEpochLoop.reset (batch_progress, and the warning).
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder" && "$folder/bin/pip" install --quiet torch==2.13.0 lightning==2.6.6
"$folder/bin/python" - "$folder" 2> "$folder/stderr" <<'PYTHON'
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, index):
        self.seen.append((index, int(batch)))
        return self.layer(batch[:, None]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)


def fit(checkpoint=None):
    module = Module()
    save = ModelCheckpoint(dirpath=sys.argv[1], filename="{step}", every_n_train_steps=4, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[save], default_root_dir=sys.argv[1],
    )
    trainer.fit(module, DataLoader(torch.arange(10.0), shuffle=False), ckpt_path=checkpoint)
    return module.seen


whole, resumed = fit(), fit(f"{sys.argv[1]}/step=4.ckpt")
print("number of the batch and its sample, resumed after the fourth batch:", resumed)
raise SystemExit((whole, resumed) != ([(n, n) for n in range(10)], [(n, n - 4) for n in range(4, 10)]))
PYTHON
