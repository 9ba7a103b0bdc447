"""``SCRIPT FOLDER MODE [NAME ...]``: runs scripts with one or several trainings, one after the other.

Each of them crashes, and is begun again by the launcher (MODE ``--launched``), or in a new child of this process
(``--plain``). With ``--launched-whole`` and ``--whole``, none crashes. The weights that each training results in are in
``FOLDER/NAME/TRAINING.json``, and every step of every attempt in ``steps.jsonl``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

PAUSE_S = 2.5
"""Longer than the tests' ``--hang-timeout``."""

Script = Callable[[Path], None]


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def crash(folder: Path, name: str) -> None:
    """Once per name."""
    marker = folder / f"crashed-{name}"
    if rank() == 0 and not marker.exists() and "whole" not in sys.argv[2]:
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def note_step(folder: Path, name: str, step: int, ids: list[int]) -> None:
    with (folder / f"steps-{rank()}.jsonl").open("a") as file:
        file.write(f"{json.dumps([name, step, ids])}\n")


def save(folder: Path, name: str, model: torch.nn.Module) -> None:
    if rank() == 0:
        weights = [value.hex() for parameter in model.parameters() for value in parameter.flatten().tolist()]
        (folder / f"{name}.json").write_text(json.dumps(weights))


def done(folder: Path, name: str) -> bool:
    return (folder / f"{name}.json").exists()


def run(root: Path, scripts: list[Script]) -> None:
    for script in scripts:
        folder = root / script.__name__
        folder.mkdir(parents=True, exist_ok=True)
        if not done(folder, "finished"):
            script(folder)
            (folder / "finished.json").write_text("true")


def repeat(root: Path, scripts: list[Script]) -> None:
    """As a launcher does: in a new process after each crash."""
    code = -1
    while code != 0:
        child = os.fork()
        if child == 0:
            run(root, scripts)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL), code


def main(scripts: list[Script]) -> None:
    folder, mode, *names = sys.argv[1:]
    chosen = [script for script in scripts if not names or script.__name__ in names]
    (run if mode.startswith("--launched") else repeat)(Path(folder), chosen)
