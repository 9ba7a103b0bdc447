#!/usr/bin/env bash
# transformers 5.23.0: of two callbacks of one class, a resumed Trainer restores the states that they had when training
# began, not those of the checkpoint, and each checkpoint holds two states more than the one before. Here an
# EarlyStoppingCallback that has counted 3 evaluations without progress at the checkpoint has 3 after the resume if it is
# the only one, and 0 if another EarlyStoppingCallback, with another threshold, stands beside it: training stops later.
# One would guess: restore_callback_states_from_checkpoint restores what the checkpoint says, as it does for one callback;
# a comment in the code promises it for several.
# Source: transformers/trainer.py, _save_checkpoint appends to a list in stateful_callbacks that is never emptied, and
# _load_callback_state takes the first states of that list; huggingface/transformers pull request 33875, open since 2024.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder" && "$folder/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
HF_HUB_OFFLINE=1 "$folder/bin/python" - "$folder/out" 2> "$folder/stderr" <<'PYTHON'
import json
import sys

import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x):
        return {"loss": (self.layer(x) - x).square().mean()}


class Look(TrainerCallback):
    """Notes how many evaluations without progress each callback has counted before the first step."""

    def __init__(self, watched):
        self.watched, self.counts = watched, None

    def on_step_begin(self, args, state, control, **others):
        if self.counts is None:
            self.counts = [callback.early_stopping_patience_counter for callback in self.watched()]


def run(name, number, resume=None):
    arguments = TrainingArguments(
        f"{sys.argv[1]}/{name}",
        learning_rate=0.0,  # no progress
        max_steps=9 if resume else 4,
        per_device_train_batch_size=1,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        label_names=["x"],
        prediction_loss_only=True,
        restore_callback_states_from_checkpoint=True,
        report_to="none",
        use_cpu=True,
    )
    data = [{"x": torch.tensor([float(index)])} for index in range(9)]
    stops = [EarlyStoppingCallback(5, threshold) for threshold in (0.0, 0.1)[:number]]
    trainer = Trainer(Line(), arguments, train_dataset=data, eval_dataset=data[:1], callbacks=stops)

    def watched():
        return [each for each in trainer.callback_handler.callbacks if isinstance(each, EarlyStoppingCallback)]

    look = Look(watched)
    trainer.add_callback(look)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.state.global_step, look.counts


found = []
for name, number in (("one", 1), ("two", 2)):
    run(name, number)
    checkpoint = f"{sys.argv[1]}/{name}/checkpoint-4"
    saved = json.load(open(f"{checkpoint}/trainer_state.json"))["stateful_callbacks"]["EarlyStoppingCallback"]
    saved = saved if isinstance(saved, list) else [saved]
    steps, counts = run(name, number, checkpoint)
    last = [state["attributes"]["early_stopping_patience_counter"] for state in saved[-number:]]
    print(f"{name}: {len(saved)} states saved, the newest {last}; resumed with {counts}; stopped at step {steps}")
    found.append((len(saved), last, counts, steps))
raise SystemExit(found != [(1, [3], [3], 6), (10, [3, 3], [0, 0], 9)])
PYTHON
