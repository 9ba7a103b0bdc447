"""Scripts with the ``Trainer`` of transformers and one or several trainings: see ``trainings.py``."""

from __future__ import annotations

from trainings import PAUSE_S, Scripts, Training, crash, fail, main, note_step, save  # isort: skip

import os
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

STEPS = 6
"""In an epoch."""


class Numbers(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, steps: int = STEPS) -> None:
        self.steps = steps

    def __len__(self) -> int:
        return 2 * self.steps * int(os.environ.get("WORLD_SIZE", "1"))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([float(index)])}


class Line(torch.nn.Module):
    def __init__(self, folder: Path, name: str) -> None:
        super().__init__()
        self.folder, self.name, self.step = folder, name, 0
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        note_step(self.folder, self.name, self.step, [int(value) for value in x.flatten().tolist()])
        return {"loss": (self.layer(x / 12) - x / 6).square().mean()}


class Crashes(TrainerCallback):
    """After the given steps, once each, and in the given hook."""

    def __init__(self, model: Line, crashes: tuple[int, ...], hook: str) -> None:
        self.model, self.crashes, self.hook = model, crashes, hook

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.model.step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in self.crashes:
            end = fail if self.hook == "raise" else crash
            end(self.model.folder, f"{self.model.name}-{state.global_step}")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.hook == "last epoch" and state.global_step == state.max_steps:
            crash(self.model.folder, self.model.name)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.hook == "end":
            save(self.model.folder, self.model.name, self.model)
            crash(self.model.folder, self.model.name)


class Pauses(TrainerCallback):
    """In a step, in evaluation, and at the end of training."""

    def pause(self, *_: Any, **__: Any) -> None:
        time.sleep(PAUSE_S)

    on_train_begin = on_evaluate = on_save = on_train_end = pause


def arguments_in(folder: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        str(folder), report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=100, **options
    )


class TransformersScripts(Scripts):
    def _run(self, training: Training) -> Line:
        folder = training.folder
        arguments = arguments_in(
            folder,
            per_device_train_batch_size=2,
            seed=training.seed,
            num_train_epochs=training.epochs,
            max_steps=training.steps,
            learning_rate=training.lr,
            save_steps=training.save_every,
        )
        data: Any = Numbers()
        if training.fold is not None:
            data = Subset(Numbers(2 * STEPS), training.selected(3 * STEPS))
        if training.is_seeded:
            torch.manual_seed(training.seed)
        model = Line(folder, training.name)
        crashes = Crashes(model, training.crashes, training.hook)
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[crashes])
        checkpoint = folder / f"checkpoint-{training.resume_at}"
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint.exists() else None)
        return model

    def seeded_before_training(self, folder: Path) -> None:
        torch.manual_seed(11)
        model = Line(folder, "one")
        trainer = Trainer(model, arguments_in(folder, save_strategy="no"), train_dataset=Numbers())
        torch.manual_seed(12)
        trainer.train()
        save(folder, "one", model)

    def one_training_at_the_end_of_a_part_of_an_epoch(self, folder: Path) -> None:
        save(folder, "one", self._train(folder, "one", hook="last epoch", epochs=1.5, save_every=3))

    def explicit_at_the_last_step(self, folder: Path) -> None:
        save(folder, "one", self._train(folder, "one", hook="last epoch", steps=10, resume_at=10))

    def pauses(self, folder: Path) -> None:
        """Longer than the time-out for heartbeats, which the script does not send."""
        torch.manual_seed(1)
        model = Line(folder, "one")
        arguments = arguments_in(folder, max_steps=2, save_steps=1, eval_strategy="steps", eval_steps=2)
        data = {"train_dataset": Numbers(), "eval_dataset": Numbers()}
        Trainer(model, arguments, callbacks=[Pauses()], **data).train()
        time.sleep(PAUSE_S)
        save(folder, "one", model)

    def accelerated(self, folder: Path) -> None:
        """With Accelerate only: checkpoints, and how it resumes, are its own."""
        accelerator = Accelerator(cpu=True)
        set_seed(5)
        line = torch.nn.Linear(1, 1)
        data = DataLoader(TensorDataset(torch.arange(2.0 * STEPS)[:, None]), batch_size=2, shuffle=True)
        model, optimizer, loader = accelerator.prepare(
            line, torch.optim.SGD(line.parameters(), lr=0.001), data
        )
        step = 0
        if (folder / "state").exists():
            accelerator.load_state(str(folder / "state"))
            step = STEPS
        while step < 2 * STEPS:
            for (x,) in loader:
                note_step(folder, "one", step, [int(value) for value in x.flatten().tolist()])
                optimizer.zero_grad()
                accelerator.backward((model(x) - x).square().mean())
                optimizer.step()
                step += 1
                if step == STEPS:
                    accelerator.save_state(str(folder / "state"))
                if step == STEPS + 2:
                    crash(folder, "one")
        save(folder, "one", line)


if __name__ == "__main__":
    main(TransformersScripts(), {})
