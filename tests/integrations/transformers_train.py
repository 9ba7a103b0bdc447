"""Runs examples/transformers_train.py as it stands, and writes down what its Trainer does.

Until the file ``finish`` is there, a step takes a while, and longer in the course of the epoch, so that a test has the
time to change the world.
"""

from __future__ import annotations

from notes import note  # isort: skip

import argparse
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_train.py"
TOKENS = 64


def record(folder: Path, pause_s: float, *, save_at: int | None, no_dropout: bool) -> None:
    """Have every Trainer call a Recorder."""
    init, training_step = Trainer.__init__, Trainer.training_step

    def recording_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for layer in self.model.modules():
            if no_dropout and isinstance(layer, torch.nn.Dropout):
                layer.p = 0.0
        self.recorder = Recorder(self, folder, pause_s, save_at)
        self.add_callback(self.recorder)

    def recording_step(self: Any, model: Any, inputs: Any, *more: Any) -> Any:
        loss = training_step(self, model, inputs, *more)
        starts = inputs["input_ids"][:, :2].tolist()
        self.recorder.ids += [first * TOKENS + second for first, second in starts]
        self.recorder.losses.append(loss.item())
        return loss

    Trainer.__init__ = recording_init  # type: ignore[method-assign]
    Trainer.training_step = recording_step  # type: ignore[method-assign]


class Recorder(TrainerCallback):
    def __init__(self, trainer: Trainer, folder: Path, pause_s: float, save_at: int | None) -> None:
        self.trainer = trainer
        self.folder = folder
        self.pause_s = pause_s
        self.save_at = save_at
        self.ids: list[int] = []
        self.losses: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("born", state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("step", state, ids=self.ids, losses=self.losses, of=state.max_steps)
        self.ids, self.losses = [], []
        control.should_save |= state.global_step == self.save_at
        pause_s = self.pause_s * (1 if state.epoch < 0.4 else 10 if state.epoch < 0.7 else 1000)
        ends_s = time.monotonic() + pause_s
        while time.monotonic() < ends_s and not (self.folder / "finish").exists():
            time.sleep(0.02)

    def note(self, kind: str, state: Any, **more: object) -> None:
        place = {"rank": self.trainer.args.process_index, "epoch": state.epoch, "step": state.global_step}
        note(self.folder, kind, **place, **more)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--pause", type=float, default=0.04)
    parser.add_argument("--no-dropout", action="store_true")
    parser.add_argument("--save-at", type=int, metavar="STEP")
    options, arguments = parser.parse_known_args()
    record(options.folder, options.pause, save_at=options.save_at, no_dropout=options.no_dropout)
    sys.argv = [str(EXAMPLE), "--output-dir", str(options.folder / "checkpoints"), *arguments]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    main()
