"""Scripts with the ``Trainer`` of transformers and one or several trainings: see ``trainings.py``."""

from __future__ import annotations

from trainings import PAUSE_S, claim, crash, done, fail, in_another_run, main, note_step, save  # isort: skip

import contextlib
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


def train(
    folder: Path,
    name: str,
    *,
    crashes: tuple[int, ...] = (),
    hook: str = "",
    seed: int = 3,
    resume: Any = None,
    is_seeded: bool = True,
    data: Any = None,
    **options: Any,
) -> Line:
    settings: dict[str, Any] = {"num_train_epochs": 2, "save_steps": 2, **options}
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        seed=seed,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=100,
        **settings,
    )
    if is_seeded:
        torch.manual_seed(seed)
    model = Line(folder, name)
    callbacks = [Crashes(model, crashes, hook)]
    trainer = Trainer(model, arguments, train_dataset=data or Numbers(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return model


# -- the scripts -----------------------------------------------------------------------------------


def one_training(folder: Path) -> None:
    save(folder, "one", train(folder, "one", crashes=(9,), num_train_epochs=3))


def seeded_before_training(folder: Path) -> None:
    torch.manual_seed(11)
    model = Line(folder, "one")
    arguments = TrainingArguments(str(folder), report_to="none", use_cpu=True, save_strategy="no")
    trainer = Trainer(model, arguments, train_dataset=Numbers())
    torch.manual_seed(12)
    trainer.train()
    save(folder, "one", model)


def one_training_at_its_last_step(folder: Path) -> None:
    model = train(folder, "one", hook="last epoch", max_steps=10)
    save(folder, "one", model)


def one_training_at_the_end_of_a_part_of_an_epoch(folder: Path) -> None:
    model = train(folder, "one", hook="last epoch", num_train_epochs=1.5, save_steps=3)
    save(folder, "one", model)


def ended_training(folder: Path) -> None:
    model = train(folder, "one")
    crash(folder, "after")
    save(folder, "one", model)


def folds_that_are_skipped(folder: Path) -> None:
    for fold in range(4):
        name = f"fold-{fold}"
        if not done(folder, name):
            crashes = {0: (5,), 2: (5, 7)}.get(fold, ())
            save(folder, name, train(folder, name, crashes=crashes, seed=fold))


def folds_done_when_training_ends(folder: Path) -> None:
    for fold in range(2):
        if not done(folder, f"fold-{fold}"):
            model = train(folder, f"fold-{fold}", hook="end" if fold == 0 else "", seed=fold)
            save(folder, f"fold-{fold}", model)


def explicit(folder: Path) -> None:
    checkpoint = folder / "checkpoint-6"
    resume = str(checkpoint) if checkpoint.exists() else None
    save(folder, "one", train(folder, "one", crashes=(9,), resume=resume))


def explicit_at_the_last_step(folder: Path) -> None:
    resume = str(folder / "checkpoint-10") if (folder / "checkpoint-10").exists() else None
    save(folder, "one", train(folder, "one", hook="last epoch", max_steps=10, resume=resume))


class Pauses(TrainerCallback):
    """In a step, in evaluation, and at the end of training."""

    def pause(self, *_: Any, **__: Any) -> None:
        time.sleep(PAUSE_S)

    on_train_begin = on_evaluate = on_save = on_train_end = pause


def pauses(folder: Path) -> None:
    """Longer than the time-out for heartbeats, which the script does not send."""
    torch.manual_seed(1)
    model = Line(folder, "one")
    arguments = TrainingArguments(
        str(folder),
        max_steps=2,
        save_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        use_cpu=True,
        report_to="none",
    )
    trainer = Trainer(model, arguments, train_dataset=Numbers(), eval_dataset=Numbers(), callbacks=[Pauses()])
    trainer.train()
    time.sleep(PAUSE_S)
    save(folder, "one", model)


def accelerated(folder: Path) -> None:
    """With Accelerate only: checkpoints, and how it resumes, are its own."""
    accelerator = Accelerator(cpu=True)
    set_seed(5)
    line = torch.nn.Linear(1, 1)
    data = DataLoader(TensorDataset(torch.arange(2.0 * STEPS)[:, None]), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(line, torch.optim.SGD(line.parameters(), lr=0.001), data)
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


def one_training_without_a_seed(folder: Path) -> None:
    """The Trainer has one, but the weights that it begins with are never the same."""
    train(folder, "one", crashes=(9,), num_train_epochs=3, is_seeded=False)


def trials_with_another_lr(folder: Path) -> None:
    """A queue, from which each trial is taken once; the first one is killed."""
    while (trial := claim(folder)) < 3:
        changed = {"learning_rate": 0.1} if trial > 0 else {}
        save(folder, f"trial-{trial}", train(folder, "trial", crashes=(5,), **changed))


def folds_that_are_claimed(folder: Path) -> None:
    """Of equal length, with the same settings."""
    while (fold := claim(folder)) < 3:
        chosen = [number for number in range(3 * STEPS) if number % 3 != fold]
        data = Subset(Numbers(2 * STEPS), chosen)
        save(folder, f"fold-{fold}", train(folder, "fold", crashes=(5,), data=data))


def handled_exception(folder: Path) -> None:
    """The training it has left is over: the one after it begins, with the same settings, in another process."""
    if not (folder / "failed-one-5").exists():
        with contextlib.suppress(FloatingPointError):
            train(folder, "one", crashes=(5,), hook="raise")
    crash(folder, "handled")
    save(folder, "one", train(folder, "one", crashes=(5,), hook="raise"))


def exception_that_ends_the_process(folder: Path) -> None:
    save(folder, "one", train(folder, "one", crashes=(9,), hook="raise", num_train_epochs=3))


def exception_with_which_the_script_exits(folder: Path) -> None:
    try:
        save(folder, "one", train(folder, "one", crashes=(9,), hook="raise", num_train_epochs=3))
    except FloatingPointError:
        raise SystemExit(1) from None


def overwritten_by_another_run(folder: Path) -> None:
    """As soon as this one has crashed."""
    if (folder / "crashed-one-5").exists():
        in_another_run(lambda: train(folder, "another", seed=1))
    save(folder, "one", train(folder, "one", crashes=(5,)))


SCRIPTS = [
    one_training_without_a_seed,
    trials_with_another_lr,
    folds_that_are_claimed,
    handled_exception,
    exception_that_ends_the_process,
    exception_with_which_the_script_exits,
    overwritten_by_another_run,
    accelerated,
    pauses,
    one_training,
    seeded_before_training,
    one_training_at_its_last_step,
    one_training_at_the_end_of_a_part_of_an_epoch,
    ended_training,
    folds_that_are_skipped,
    folds_done_when_training_ends,
    explicit,
    explicit_at_the_last_step,
]

if __name__ == "__main__":
    main(SCRIPTS, {})
