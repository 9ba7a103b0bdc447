#!/usr/bin/env bash
# Lightning 2.6.6: a KeyboardInterrupt within trainer.fit leaves it as SystemExit(1). `except KeyboardInterrupt:` around
# trainer.fit is never entered, and lines after fit do not run; neither does `except Exception:`.
# One would guess: the exception that was raised leaves the call, as other exceptions do, or, as in earlier versions
# (1.x), fit returns and the script goes on to test or save.
# Source: lightning/pytorch/trainer/call.py, _call_and_handle_interrupt.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder" && "$folder/bin/pip" install --quiet torch==2.13.0 lightning==2.6.6
"$folder/bin/python" - "$folder" 2> "$folder/stderr" <<'PYTHON'
import sys

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, index):
        raise KeyboardInterrupt

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = lightning.Trainer(
    accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_progress_bar=False,
    enable_model_summary=False, enable_checkpointing=False, default_root_dir=sys.argv[1],
)
try:
    trainer.fit(Module(), DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2))
    found = "nothing"
except BaseException as error:
    found = repr(error)
print("what leaves trainer.fit after a KeyboardInterrupt:", found)
raise SystemExit(found != "SystemExit(1)")
PYTHON
