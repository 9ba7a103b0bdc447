"""Trains with a Trainer several times in one process, first without the integration, and prints what each used.

Each line is the samples of the steps of one training, as JSON.
"""

from __future__ import annotations

import gc
import json
import os
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from elastic_agent.integrations.transformers import install


class Numbers(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([float(index)])}


class Recorder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.steps: list[list[int]] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.steps.append([int(value) for value in x.flatten().tolist()])
        return {"loss": self.layer(x / 100).pow(2).mean()}


class Interrupt(TrainerCallback):
    """Stops after a step; and requests the loader of the training data, as callbacks that compute statistics do."""

    def __init__(self, last: int, request: int) -> None:
        self.last, self.request = last, request
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.request:
            next(iter(self.trainer.get_train_dataloader()))
        control.should_training_stop |= state.global_step == self.last


def train(
    folder: str,
    samples: int,
    *,
    last: int = 0,
    request: int = 0,
    resume: str | None = None,
    accumulate: int = 1,
) -> None:
    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulate,
        save_steps=1,
        train_sampling_strategy="sequential",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    model = Recorder()
    interrupt = Interrupt(last, request)
    interrupt.trainer = Trainer(model, arguments, train_dataset=Numbers(samples), callbacks=[interrupt])
    interrupt.trainer.train(resume_from_checkpoint=resume or False)
    print("steps", json.dumps(model.steps), flush=True)


def main() -> None:
    gc.freeze()  # each training looks for garbage, without which it need not look through transformers
    train("plain", 10, last=3)
    install()
    train("requested", 10, last=4, request=3)
    train("requested-resumed", 10, resume="requested/checkpoint-4")
    train("plain-resumed", 10, resume="plain/checkpoint-3", last=4)
    train("plain-resumed-again", 10, resume="plain-resumed/checkpoint-4")
    train("plain-accumulated", 10, resume="plain/checkpoint-2", accumulate=2)
    train("grown", 12, resume="requested/checkpoint-4")
    train("grown-after-an-epoch", 12, resume="requested-resumed/checkpoint-5")
    os._exit(0)  # to free all that is imported takes seconds


if __name__ == "__main__":
    main()
