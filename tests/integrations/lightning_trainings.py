"""Lightning scripts with one or several trainings: see ``trainings.py``."""

from __future__ import annotations

from notes import ONE_WORKER  # isort: skip
from trainings import PAUSE_S, Scripts, Training, crash, fail, main, note_step, save  # isort: skip

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


def fit(model: Line, trainer: lightning.Trainer, data: Any = None, seed: int = 0, **options: Any) -> None:
    torch.manual_seed(seed)
    model.network.reset_parameters()
    order = torch.Generator().manual_seed(seed)
    loader = DataLoader(data or Numbers(), batch_size=2, shuffle=data is None, generator=order)
    trainer.fit(model, loader, DataLoader(Numbers(), batch_size=12), **options)


class Pauses(lightning.Callback):
    """In a step, in validation, and at the end of training."""

    def pause(self, *_: Any) -> None:
        time.sleep(PAUSE_S)

    on_train_start = on_validation_end = on_train_end = pause

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            self.pause()


class Late(Line):
    lr_late = 0.01

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr_late)


class LightningScripts(Scripts):
    def _run(self, training: Training) -> Line:
        folder = training.folder
        model = Line(folder, training.name, training.crashes, training.hook)
        model.lr = training.lr
        epochs = int(training.epochs) if training.steps < 0 else -1
        trainer = trainer_in(folder, max_epochs=epochs, max_steps=training.steps)
        trainer.checkpoint_callback._enable_version_counter = not training.overwrites
        if not training.is_seeded:
            trainer.fit(model, DataLoader(Numbers(), batch_size=2, shuffle=True))
            return model
        checkpoint = folder / "checkpoints" / f"epoch=0-step={training.resume_at}.ckpt"
        data = None
        if training.fold is not None:
            data = Subset(Numbers(2 * STEPS), training.selected(3 * STEPS))
        fit(model, trainer, data, training.seed, ckpt_path=checkpoint if checkpoint.exists() else None)
        return model

    def fit_test_fit(self, folder: Path) -> None:
        model = self._train(folder, "one")
        trainer_in(folder).test(model, DataLoader(Numbers(), batch_size=2), verbose=False)
        again = self._train(folder, "again", crashes=(5,), seed=1)
        save(folder, "one", model)
        save(folder, "again", again)

    def alternating(self, folder: Path) -> None:
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

    def folder_that_cannot_be_written(self, folder: Path) -> None:
        model = Line(folder, "one", crashes=(9,))
        trainer = trainer_in(folder)
        trainer._default_root_dir = "/proc/none"
        fit(model, trainer)
        save(folder, "one", model)

    def pauses(self, folder: Path) -> None:
        """Longer than the time-out for heartbeats, which the script does not send."""
        model = Line(folder, "one")
        trainer = trainer_in(folder, max_epochs=1)
        trainer.callbacks.append(Pauses())
        fit(model, trainer)
        time.sleep(PAUSE_S)
        save(folder, "one", model)

    def late_difference(self, folder: Path) -> None:
        """Only the optimizer shows it."""
        Late.lr_late = 0.1 if (folder / "crashed-one-5").exists() else 0.01
        model = Late(folder, "one", (5,))
        fit(model, trainer_in(folder))
        save(folder, "one", model)


if __name__ == "__main__":
    main(LightningScripts(), ONE_WORKER)
