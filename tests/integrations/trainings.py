"""``SCRIPT FOLDER MODE [NAME ...]``: runs scripts with one or several trainings, one after the other.

Each of them crashes, and is begun again by the launcher (MODE ``launched``), or in a new child of this process: a plain
one (``plain``), or one that is like a worker of an agent (``worker``). With ``launched-whole`` and ``whole``, none
crashes. The weights that each training results in are in ``FOLDER/NAME/TRAINING.json``, and every step of every attempt
in ``steps.jsonl``. With ``plain,worker``, FOLDER has a folder for each.
"""

from __future__ import annotations

from notes import WORKER  # isort: skip

import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from elastic_agent.integrations import post_import

PAUSE_S = 2.5
"""Longer than the tests' ``--hang-timeout``."""

Script = Callable[[Path], None]


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


def run(root: Path, scripts: list[Script]) -> None:
    for script in scripts:
        folder = root / script.__name__
        folder.mkdir(parents=True, exist_ok=True)
        if not done(folder, "finished"):
            script(folder)
            (folder / "finished.json").write_text("true")


def repeat(root: Path, mode: str, scripts: list[Script], world: dict[str, str]) -> None:
    """As a launcher does: in a new process after each crash."""
    gc.freeze()  # each process would look through the framework at its end, which takes it seconds
    code = -1
    while code != 0:
        child = os.fork()
        if child == 0:
            if mode == "worker":
                os.environ.update(WORKER, **world)
                post_import.watch()
            begin(root, mode, scripts)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 1, -signal.SIGKILL), code


def begin(root: Path, mode: str, scripts: list[Script]) -> None:
    global _crashing
    _crashing = "whole" not in mode
    run(root, scripts)


def main(scripts: list[Script], world: dict[str, str]) -> None:
    """``world``: variables that a worker of an agent has, too."""
    folder, modes, *names = sys.argv[1:]
    chosen = [script for script in scripts if not names or script.__name__ in names]
    for mode in modes.split(","):
        root = Path(folder, mode) if "," in modes else Path(folder)
        begin(root, mode, chosen) if mode.startswith("launched") else repeat(root, mode, chosen, world)
