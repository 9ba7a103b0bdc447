"""``SCRIPT FOLDER MODE [NAME ...]``: runs scripts with one or several trainings, one after the other.

Each of them crashes, and is begun again by the launcher (MODE ``launched``), or in a new child of this process: a plain
one (``plain``), or one that is like a worker of an agent (``worker``). With ``launched-whole`` and ``whole``, none
crashes. The weights that each training results in are in ``FOLDER/NAME/TRAINING.json``, and every step of every attempt
in ``steps.jsonl``. With ``plain,worker``, FOLDER has a folder for each.
"""

from __future__ import annotations

from notes import WORKER  # isort: skip

import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elastic_agent.integrations import post_import

PAUSE_S = 2.5
"""Longer than the tests' ``--hang-timeout``."""

_crashing = True
"""Whether scripts crash at all."""


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def crash(folder: Path, name: str) -> None:
    """Once per name."""
    marker = folder / f"crashed-{name}"
    if rank() == 0 and not marker.exists() and _crashing:
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def fail(folder: Path, name: str) -> None:
    """Once per name."""
    marker = folder / f"failed-{name}"
    if not marker.exists() and _crashing:
        marker.touch()
        raise FloatingPointError("the loss is not a number")


def claim(folder: Path) -> int:
    """The number of a trial that no process has taken: each is taken once, whether or not it is finished."""
    number = len([*folder.glob("claimed-*")])
    (folder / f"claimed-{number}").touch()
    return number


def in_another_run(train: Callable[[], object]) -> None:
    """Train to the end in a run with another id, whose folder may be the same."""
    child = os.fork()
    if child == 0:
        os.environ["ELASTIC_AGENT_RUN_ID"] = os.environ["TORCHELASTIC_RUN_ID"] = "another"
        train()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def note_step(folder: Path, name: str, step: int, ids: list[int]) -> None:
    with (folder / f"steps-{rank()}.jsonl").open("a") as file:
        file.write(f"{json.dumps([name, step, ids])}\n")


def save(folder: Path, name: str, model: torch.nn.Module) -> None:
    if rank() == 0:
        weights = [value.hex() for parameter in model.parameters() for value in parameter.flatten().tolist()]
        (folder / f"{name}.json").write_text(json.dumps(weights))


def done(folder: Path, name: str) -> bool:
    return (folder / f"{name}.json").exists()


@dataclass(frozen=True)
class Training:
    """What a script asks for."""

    folder: Path
    """For checkpoints."""
    name: str
    """In its notes."""
    crashes: tuple[int, ...] = ()
    """After these steps, once each."""
    hook: str = ""
    """``raise``: it fails there with an exception. ``last epoch``, ``end``: where it crashes too, at the end saved."""
    seed: int = 0
    """Of the weights and the order."""
    is_seeded: bool = True
    """Otherwise the weights are another ones in each process."""
    epochs: float = 2
    """Of six steps."""
    steps: int = -1
    """Instead of the epochs."""
    save_every: int = 2
    lr: float = 0.01
    fold: int | None = None
    """Of 18 steps' samples, every third one is left out, from this one on."""
    resume_at: int | None = None
    """The step of the checkpoint that the script names, if it is there."""
    overwrites: bool = False
    """Checkpoints of different trainings have the same names."""

    def selected(self, count: int) -> list[int]:
        """The samples that this fold uses."""
        return [number for number in range(count) if number % 3 != self.fold]


class Scripts:
    """What both frameworks are to run: each method is a script, with a folder of its own."""

    def _run(self, training: Training) -> torch.nn.Module:
        raise NotImplementedError

    def _train(self, folder: Path, name: str, **more: Any) -> torch.nn.Module:
        return self._run(Training(folder, name, **more))

    def one_training_without_a_seed(self, folder: Path) -> None:
        """Its weights are never the same."""
        self._train(folder, "one", crashes=(9,), epochs=3, is_seeded=False)

    def one_training(self, folder: Path) -> None:
        save(folder, "one", self._train(folder, "one", crashes=(9,), epochs=3))

    def one_training_at_its_last_step(self, folder: Path) -> None:
        save(folder, "one", self._train(folder, "one", hook="last epoch", steps=10))

    def ended_training(self, folder: Path) -> None:
        model = self._train(folder, "one")
        crash(folder, "after")
        save(folder, "one", model)

    def folds_that_are_skipped(self, folder: Path) -> None:
        for fold in range(4):
            name, crashes = f"fold-{fold}", {0: (5,), 2: (5, 7)}.get(fold, ())
            if not done(folder, name):
                save(folder, name, self._train(folder, name, crashes=crashes, seed=fold))

    def folds_done_when_training_ends(self, folder: Path) -> None:
        for fold in range(2):
            name, hook = f"fold-{fold}", "end" if fold == 0 else ""
            if not done(folder, name):
                save(folder, name, self._train(folder, name, hook=hook, seed=fold))

    def explicit(self, folder: Path) -> None:
        save(folder, "one", self._train(folder, "one", crashes=(9,), resume_at=6))

    def trials_with_another_lr(self, folder: Path) -> None:
        """A queue, from which each trial is taken once; the first one is killed."""
        while (trial := claim(folder)) < 3:
            model = self._train(folder, "trial", crashes=(5,), lr=0.1 if trial > 0 else 0.01)
            save(folder, f"trial-{trial}", model)

    def folds_that_are_claimed(self, folder: Path) -> None:
        """Of equal length, with the same settings."""
        while (fold := claim(folder)) < 3:
            save(folder, f"fold-{fold}", self._train(folder, "fold", crashes=(5,), fold=fold))

    def handled_exception(self, folder: Path) -> None:
        """The training it has left is over: the one after it begins, with the same settings, in another process."""
        if not (folder / "failed-one-5").exists():
            with contextlib.suppress(FloatingPointError):
                self._train(folder, "one", crashes=(5,), hook="raise")
        crash(folder, "handled")
        save(folder, "one", self._train(folder, "one", crashes=(5,), hook="raise"))

    def exception_that_ends_the_process(self, folder: Path) -> None:
        save(folder, "one", self._train(folder, "one", crashes=(9,), hook="raise", epochs=3))

    def exception_with_which_the_script_exits(self, folder: Path) -> None:
        try:
            self.exception_that_ends_the_process(folder)
        except FloatingPointError:
            raise SystemExit(1) from None

    def overwritten_by_another_run(self, folder: Path) -> None:
        """As soon as this one has crashed."""
        if (folder / "crashed-one-5").exists():
            in_another_run(lambda: self._train(folder, "another", seed=1, overwrites=True))
        save(folder, "one", self._train(folder, "one", crashes=(5,), overwrites=True))


def run(root: Path, scripts: Scripts, names: list[str]) -> None:
    for name in names:
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        if not done(folder, "finished"):
            getattr(scripts, name)(folder)
            (folder / "finished.json").write_text("true")


def repeat(root: Path, mode: str, scripts: Scripts, names: list[str], world: dict[str, str]) -> None:
    """As a launcher does: in a new process after each crash."""
    gc.freeze()  # each process would look through the framework at its end, which takes it seconds
    code = -1
    while code != 0:
        child = os.fork()
        if child == 0:
            if mode == "worker":
                os.environ.update(WORKER, **world)
                post_import.watch()
            begin(root, mode, scripts, names)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 1, -signal.SIGKILL), code


def begin(root: Path, mode: str, scripts: Scripts, names: list[str]) -> None:
    global _crashing
    _crashing = "whole" not in mode
    run(root, scripts, names)


def main(scripts: Scripts, world: dict[str, str]) -> None:
    """``world``: variables that a worker of an agent has, too."""
    folder, modes, *chosen = sys.argv[1:]
    names = [name for name in dir(scripts) if not name.startswith("_") and (not chosen or name in chosen)]
    names.sort(key=lambda name: "without_a_seed" not in name)  # before others set one in the same process
    for mode in modes.split(","):
        root = Path(folder, mode) if "," in modes else Path(folder)
        if mode.startswith("launched"):
            begin(root, mode, scripts, names)
        else:
            repeat(root, mode, scripts, names, world)
