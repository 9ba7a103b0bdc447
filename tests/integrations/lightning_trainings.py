"""Lightning scripts with one or several trainings: see ``trainings.py``."""

from __future__ import annotations

from notes import ONE_WORKER  # isort: skip
from trainings import PAUSE_S, claim, crash, done, fail, in_another_run, main, note_step, save  # isort: skip

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import lightning
import omegaconf  # noqa: F401 - when Lightning saves, it imports this, once in each of the processes
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, Subset

STEPS = 6
"""In an epoch."""


class Numbers(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, steps: int = STEPS) -> None:
        self.steps = steps

    def __len__(self) -> int:
        return 2 * self.steps * int(os.environ.get("WORLD_SIZE", "1"))

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([index / len(self)]), index


class Line(lightning.LightningModule):
    """Crashes after the given steps, once each, and in the given hook."""

    def __init__(self, folder: Path, name: str, crashes: tuple[int, ...] = (), hook: str = "") -> None:
        super().__init__()
        self.folder, self.name, self.crashes, self.hook = folder, name, crashes, hook
        self.network = torch.nn.Linear(1, 1)
        self.lr = 0.01

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        values, ids = batch
        note_step(self.folder, self.name, self.trainer.global_step, ids.tolist())
        return (self.network(values) - 2 * values).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step in self.crashes:
            end = fail if self.hook == "raise" else crash
            end(self.folder, f"{self.name}-{self.trainer.global_step}")

    def on_train_epoch_end(self) -> None:
        if self.hook == "last epoch" and self.trainer.global_step == self.trainer.max_steps:
            crash(self.folder, self.name)

    def on_train_end(self) -> None:
        if self.hook == "end":
            save(self.folder, self.name, self)
            crash(self.folder, self.name)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """There is one, so that training is resumed between steps that were validated."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.network(batch[0]).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def trainer_in(root: Path, **options: Any) -> lightning.Trainer:
    settings: dict[str, Any] = {"max_epochs": 2, **options}
    return lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        callbacks=[ModelCheckpoint(root / "checkpoints", every_n_train_steps=2, save_top_k=-1)],
        **settings,
    )


def fit(model: Line, trainer: lightning.Trainer, seed: int = 0, **options: Any) -> None:
    torch.manual_seed(seed)
    model.network.reset_parameters()
    loader = DataLoader(Numbers(), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(seed))
    trainer.fit(model, loader, DataLoader(Numbers(), batch_size=12), **options)


# -- the scripts -----------------------------------------------------------------------------------


def one_training(folder: Path) -> None:
    model = Line(folder, "one", crashes=(9,))
    fit(model, trainer_in(folder, max_epochs=3))
    save(folder, "one", model)


def one_training_at_its_last_step(folder: Path) -> None:
    model = Line(folder, "one", hook="last epoch")
    fit(model, trainer_in(folder, max_epochs=-1, max_steps=10))
    save(folder, "one", model)


def ended_training(folder: Path) -> None:
    model = Line(folder, "one")
    trainer = trainer_in(folder)
    fit(model, trainer)
    crash(folder, "after")
    save(folder, "one", model)


def folds_that_are_skipped(folder: Path) -> None:
    for fold in range(4):
        if done(folder, f"fold-{fold}"):
            continue
        model = Line(folder, f"fold-{fold}", {0: (5,), 2: (5, 7)}.get(fold, ()))
        fit(model, trainer_in(folder), seed=fold)
        save(folder, f"fold-{fold}", model)


def folds_done_when_training_ends(folder: Path) -> None:
    for fold in range(2):
        if not done(folder, f"fold-{fold}"):
            hook = "end" if fold == 0 else ""
            fit(model := Line(folder, f"fold-{fold}", hook=hook), trainer_in(folder), seed=fold)
            save(folder, f"fold-{fold}", model)


def fit_test_fit(folder: Path) -> None:
    model = Line(folder, "one")
    fit(model, trainer_in(folder))
    trainer_in(folder).test(model, DataLoader(Numbers(), batch_size=2), verbose=False)
    again = Line(folder, "again", crashes=(5,))
    fit(again, trainer_in(folder), seed=1)
    save(folder, "one", model)
    save(folder, "again", again)


def alternating(folder: Path) -> None:
    torch.manual_seed(7)
    models = {name: Line(folder, name, crashes=(17,) if name == "b" else ()) for name in "ab"}
    trainers = {name: trainer_in(folder, max_epochs=2) for name in "ab"}
    for turn in range(2):
        for name in "ab":
            trainers[name].fit_loop.max_epochs = 2 + 2 * turn
            torch.manual_seed(turn)
            trainers[name].fit(models[name], DataLoader(Numbers(), batch_size=2, shuffle=True))
    for name in "ab":
        save(folder, name, models[name])


def explicit(folder: Path) -> None:
    checkpoint = folder / "checkpoints" / "epoch=0-step=6.ckpt"
    model = Line(folder, "one", crashes=(9,))
    fit(model, trainer_in(folder), ckpt_path=checkpoint if checkpoint.exists() else None)
    save(folder, "one", model)


def folder_that_cannot_be_written(folder: Path) -> None:
    model = Line(folder, "one", crashes=(9,))
    trainer = trainer_in(folder)
    trainer._default_root_dir = "/proc/none"
    fit(model, trainer)
    save(folder, "one", model)


class Pauses(lightning.Callback):
    """In a step, in validation, and at the end of training."""

    def pause(self, *_: Any) -> None:
        time.sleep(PAUSE_S)

    on_train_start = on_validation_end = on_train_end = pause

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            self.pause()


def pauses(folder: Path) -> None:
    """Longer than the time-out for heartbeats, which the script does not send."""
    model = Line(folder, "one")
    trainer = trainer_in(folder, max_epochs=1)
    trainer.callbacks.append(Pauses())
    fit(model, trainer)
    time.sleep(PAUSE_S)
    save(folder, "one", model)


def one_training_without_a_seed(folder: Path) -> None:
    """Its weights are never the same."""
    model = Line(folder, "one", crashes=(9,))
    trainer_in(folder, max_epochs=3).fit(model, DataLoader(Numbers(), batch_size=2, shuffle=True))


def trials_with_another_lr(folder: Path) -> None:
    """A queue, from which each trial is taken once; the first one is killed."""
    while (trial := claim(folder)) < 3:
        model = Line(folder, "trial", (5,))
        model.lr = 0.1 if trial > 0 else 0.01
        fit(model, trainer_in(folder))
        save(folder, f"trial-{trial}", model)


def folds_that_are_claimed(folder: Path) -> None:
    """Of equal length, with the same settings."""
    while (fold := claim(folder)) < 3:
        model = Line(folder, "fold", (5,))
        torch.manual_seed(0)
        model.network.reset_parameters()
        chosen = [number for number in range(3 * STEPS) if number % 3 != fold]
        data = DataLoader(Subset(Numbers(2 * STEPS), chosen), batch_size=2)
        trainer_in(folder).fit(model, data)
        save(folder, f"fold-{fold}", model)


def handled_exception(folder: Path) -> None:
    """The training it has left is over: the one after it begins, with the same settings, in another process."""
    if not (folder / "failed-one-5").exists():
        with contextlib.suppress(FloatingPointError):
            fit(Line(folder, "one", (5,), "raise"), trainer_in(folder))
    crash(folder, "handled")
    fit(model := Line(folder, "one", (5,), "raise"), trainer_in(folder))
    save(folder, "one", model)


def exception_that_ends_the_process(folder: Path) -> None:
    fit(model := Line(folder, "one", (9,), "raise"), trainer_in(folder, max_epochs=3))
    save(folder, "one", model)


def exception_with_which_the_script_exits(folder: Path) -> None:
    model = Line(folder, "one", (9,), "raise")
    try:
        fit(model, trainer_in(folder, max_epochs=3))
    except FloatingPointError:
        raise SystemExit(1) from None
    save(folder, "one", model)


def overwritten_by_another_run(folder: Path) -> None:
    """As soon as this one has crashed."""
    if (folder / "crashed-one-5").exists():
        in_another_run(lambda: fit(Line(folder, "another"), overwriting(folder), seed=1))
    fit(model := Line(folder, "one", (5,)), overwriting(folder))
    save(folder, "one", model)


def overwriting(folder: Path) -> lightning.Trainer:
    trainer = trainer_in(folder)
    trainer.checkpoint_callback.save_top_k, trainer.checkpoint_callback._enable_version_counter = -1, False
    return trainer


LR = {"late": 0.01}


def late_difference(folder: Path) -> None:
    """Only the optimizer shows it."""
    LR["late"] = 0.1 if (folder / "crashed-one-5").exists() else 0.01
    model = Late(folder, "one", (5,))
    fit(model, trainer_in(folder))
    save(folder, "one", model)


class Late(Line):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=LR["late"])


SCRIPTS = [
    one_training_without_a_seed,
    trials_with_another_lr,
    folds_that_are_claimed,
    handled_exception,
    exception_that_ends_the_process,
    exception_with_which_the_script_exits,
    overwritten_by_another_run,
    late_difference,
    pauses,
    one_training,
    one_training_at_its_last_step,
    ended_training,
    folds_that_are_skipped,
    folds_done_when_training_ends,
    fit_test_fit,
    alternating,
    explicit,
    folder_that_cannot_be_written,
]


if __name__ == "__main__":
    main(SCRIPTS, ONE_WORKER)
