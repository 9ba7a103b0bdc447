#!/usr/bin/env bash
# transformers 5.23.0: Trainer.train(resume_from_checkpoint=...) with another TrainingArguments.learning_rate trains with
# the rate of the checkpoint, without a word. trainer.args.learning_rate is the new one, and is what trackers log.
# One would guess: the arguments of this call count; a rate that cannot be applied is an error or a warning, as other
# differences between arguments and checkpoint are (for batch sizes and logging steps there is a warning).
# Source: transformers/trainer.py, _load_optimizer_and_scheduler; the scheduler's state has base_lrs.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder" && "$folder/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
HF_HUB_OFFLINE=1 "$folder/bin/python" - "$folder/out" 2> "$folder/stderr" <<'PYTHON'
import sys

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

rates = []


class Rates(TrainerCallback):
    def on_step_end(self, args, state, control, optimizer=None, **_):
        rates.append(optimizer.param_groups[0]["lr"])


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x):
        return {"loss": (self.layer(x) - x).square().mean()}


def train(rate, steps, resume=None):
    arguments = TrainingArguments(
        sys.argv[1], learning_rate=rate, max_steps=steps, save_steps=5, lr_scheduler_type="constant",
        per_device_train_batch_size=2, report_to="none", use_cpu=True,
    )
    data = [{"x": torch.tensor([float(index)])} for index in range(12)]
    rates.clear()
    trainer = Trainer(Line(), arguments, train_dataset=data, callbacks=[Rates()])
    trainer.train(resume_from_checkpoint=resume)
    return trainer.args.learning_rate, set(rates)


train(0.001, 5)
argument, used = train(0.1, 10, f"{sys.argv[1]}/checkpoint-5")
print(f"learning_rate={argument} in the arguments; used in the steps after the checkpoint: {used}")
raise SystemExit((argument, used) != (0.1, {0.001}))
PYTHON
