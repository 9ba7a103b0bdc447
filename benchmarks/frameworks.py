"""From the kill of a worker to the next training step of every rank, with scripts as users write them.

Every sample is a run of its own: two agents start, train for a while, one worker is killed; then everything is killed
and started again (on elastic-agent), as after a power failure. elastic-agent at its defaults, torchrun tuned.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from .faults import WORKER_KILLED, strike
from .figures import Figures, Options, Ratio, Result, import_torch_s, progress, ratio
from .launchers import OURS, TORCHRUN_TUNED, Launcher, running
from .scene import BOTH, HOST, PEER, SCENE_LIMIT_S, NoWorldError, Scene, World

TWO_EACH = {HOST: 2, PEER: 2}
ONE_EACH = {HOST: 1, PEER: 1}
CALM_S = 8.0
"""Training before the fault."""
FASTER_AT_LEAST = 20.0
TRIES = 2
"""Of each thing in a quick run."""


@dataclass(frozen=True)
class Subject:
    """A training script, and how soon its next step is to follow a fault."""

    name: str
    script: str
    target_s: float
    slots: Mapping[str, int]


SUBJECTS = (
    Subject("plain DDP", "plain_ddp.py", 0.5, TWO_EACH),
    Subject("plain DDP, 1 + 1 workers", "plain_ddp.py", 0.15, ONE_EACH),
    Subject("transformers", "transformers_trainer.py", 0.6, TWO_EACH),
    Subject("Lightning", "lightning_trainer.py", 0.7, TWO_EACH),
)


def run(options: Options) -> Result:
    figures = Figures()
    for _ in range(TRIES if options.quick else options.runs):
        for subject in SUBJECTS:
            for launcher in (OURS, TORCHRUN_TUNED):
                measure(figures, subject, launcher)
        figures.of("import torch, alone", "python").add(import_torch_s())
    note = f"2 + 2 workers unless stated otherwise; the worker is killed after {CALM_S:g} s of training."
    return Result("frameworks", list(figures), [note], _ratios(figures))


def _ratios(figures: Figures) -> list[Ratio]:
    found = []
    for subject in SUBJECTS:
        ours, theirs = (figures.of(_kill_of(subject), launcher.name) for launcher in (OURS, TORCHRUN_TUNED))
        found += ratio(ours, theirs, FASTER_AT_LEAST)
    return found


def _kill_of(subject: Subject) -> str:
    return f"{subject.name}: worker SIGKILL"


def measure(figures: Figures, subject: Subject, launcher: Launcher) -> None:
    """One run of this script: its first start, a kill, and its second start."""
    with Scene(running(launcher, subject.script), pause_s=0.0, slots=subject.slots) as scene:
        try:
            world, took_s = _start(scene)
            _enter(figures, f"{subject.name}: first start", launcher, took_s)
            time.sleep(CALM_S)
            _, recovery = strike(scene, WORKER_KILLED, world)
            _enter(figures, _kill_of(subject), launcher, recovery.took_s, subject.target_s)
            if launcher is not OURS:
                return
            for node in BOTH:
                scene.kill_node(node)
            _, took_s = _start(scene)
            _enter(figures, f"{subject.name}: second start", launcher, took_s)
        except NoWorldError as error:
            _enter(figures, _kill_of(subject), launcher, str(error), subject.target_s)


def _enter(
    figures: Figures, measured: str, launcher: Launcher, outcome: float | str, target_s: float | None = None
) -> None:
    target = target_s if launcher is OURS else None
    figures.of(measured, launcher.name, target=target).add(outcome)
    progress(f"{measured}, {launcher.name}: {outcome}")


def _start(scene: Scene) -> tuple[World, float]:
    """Start both nodes at once; their world in its stride, and the time to the first step of every rank.

    Raises:
        NoWorldError: there was none.
    """
    began_s = scene.start(HOST)
    scene.start(PEER)
    world = scene.await_world(scene.size(BOTH), began_s, SCENE_LIMIT_S, stage="steady")
    return world, round(world.latest_s("collective") - began_s, 4)
