#!/usr/bin/env bash
# transformers 5.23.0: Trainer.train(resume_from_checkpoint=...) with the checkpoint of the last step (max_steps=10, the
# epoch has 6 steps) trains an eleventh step and ends with global_step 11.
# One would guess: nothing is left to train, so the weights are those of the checkpoint. A job that was killed between its
# last checkpoint and its end, and is started again, gets other weights than one that was not killed.
# Source: transformers/trainer.py, _run_epoch checks should_training_stop after a step and not before.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder" && "$folder/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
HF_HUB_OFFLINE=1 "$folder/bin/python" - "$folder/out" 2> "$folder/stderr" <<'PYTHON'
import sys

import torch
from transformers import Trainer, TrainingArguments


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x):
        return {"loss": (self.layer(x) - x).square().mean()}


def steps(resume):
    arguments = TrainingArguments(
        sys.argv[1], per_device_train_batch_size=2, max_steps=10, save_steps=5, report_to="none", use_cpu=True
    )
    data = [{"x": torch.tensor([float(index)])} for index in range(12)]
    trainer = Trainer(Line(), arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.state.global_step


found = steps(None), steps(f"{sys.argv[1]}/checkpoint-10")
print(f"global_step with max_steps=10: {found[0]}; resumed from checkpoint-10: {found[1]}")
raise SystemExit(found != (10, 11))
PYTHON
