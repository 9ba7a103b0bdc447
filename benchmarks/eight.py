"""Eight workers on one agent: what a node with eight accelerators sees, on as many cores as there are here.

One scene gives the time to start, the memory at rest, and the recovery from workers killed one after another. Then a
node with one worker joins a node with eight.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from .faults import ALONE_WORKER_KILLED, NODE_JOINS, Recovery, kill_again_and_again, measure
from .figures import Figures, Ratio, Result, import_torch_s, ratio
from .launchers import OURS, OURS_COLD, TORCHRUN_TUNED, Launcher, alone
from .options import Options, progress
from .processes import by_kind, pss_mb, rss_mb
from .scene import HOST, PEER, Scene, SpoiltError, World
from .stages import RECOVERY_STAGES, START_STAGES, Stages, breakdown, median_stages

WORKERS = 8
JOIN_SLOTS = {HOST: WORKERS, PEER: 1}
START_FASTER_AT_LEAST = 3.0
KILL_TARGET_S = INTERRUPTION_TARGET_S = 0.15
KILLS, KILLS_OF_SLOW = 5, 2
CALM_S = 3.0
"""Before memory is looked at: the next standbys are there."""
TRIES = 3
ONE = {"workers": "worker", "standbys": "standby"}

WARM, COLD, THEIRS = alone(OURS), alone(OURS_COLD), alone(TORCHRUN_TUNED)


@dataclass
class Book:
    """What was measured so far."""

    figures: Figures = field(default_factory=Figures)
    start_stages: dict[str, list[Stages]] = field(default_factory=dict)
    recovery_stages: dict[str, list[Stages]] = field(default_factory=dict)

    def enter_recovery(self, what: str, launcher: Launcher, outcome: Recovery | str) -> None:
        is_warm = launcher in (WARM, OURS)
        figure = self.figures.of(what, launcher.name)
        figure.add(outcome if isinstance(outcome, str) else outcome.took_s)
        progress(f"{what}, {launcher.name}: {outcome if isinstance(outcome, str) else outcome.took_s}")
        if isinstance(outcome, Recovery):
            target = INTERRUPTION_TARGET_S if is_warm else None
            interruption = self.figures.of(f"{what}: survivors' interruption", launcher.name, target=target)
            interruption.add(outcome.interruption_s)
            if outcome.stages:
                self.recovery_stages.setdefault(f"{what}, {launcher.name}", []).append(outcome.stages)

    def result(self) -> Result:
        start, recovery = (
            {name: median_stages(names, samples) for name, samples in stages.items()}
            for names, stages in ((START_STAGES, self.start_stages), (RECOVERY_STAGES, self.recovery_stages))
        )
        tables = {"start_stages": start, "recovery_stages": recovery}
        note = (
            "Memory at rest; PSS: what processes share is divided among them, so that a sum counts everything once. "
            "The job: all processes of the node. A joining node starts on the cores on which the eight go on training."
        )
        return Result("eight", list(self.figures), [note], self._ratios(), tables)

    def _ratios(self) -> list[Ratio]:
        start, theirs = (self.figures.of("start", one.name) for one in (WARM, THEIRS))
        kill, their_kill = (self.figures.of(ALONE_WORKER_KILLED.name, one.name) for one in (WARM, THEIRS))
        kill.target = KILL_TARGET_S
        if theirs.median is not None:
            start.target = theirs.median / START_FASTER_AT_LEAST
        return [*ratio(start, theirs, START_FASTER_AT_LEAST), *ratio(kill, their_kill)]


def run(options: Options) -> Result:
    book = Book()
    for _ in range(options.times):
        for launcher, kills in ((WARM, KILLS), (COLD, KILLS_OF_SLOW), (THEIRS, KILLS_OF_SLOW)):
            _alone(book, launcher, kills)
        book.figures.of("import torch, alone", "python").add(import_torch_s())
        for launcher in (OURS, TORCHRUN_TUNED):
            outcome = measure(launcher, NODE_JOINS, slots=JOIN_SLOTS)
            book.enter_recovery("a node joins", launcher, outcome)
    return book.result()


def _alone(book: Book, launcher: Launcher, kills: int) -> None:
    for _ in range(TRIES):
        with Scene(launcher, slots={HOST: WORKERS}) as scene:
            began_s = scene.start(HOST)
            try:
                world = scene.settle_down(())
            except SpoiltError as spoilt:
                book.figures.of("start", launcher.name).add(str(spoilt))
                continue
            _enter_start(book, scene, world, began_s)
            time.sleep(CALM_S)
            _enter_memory(book.figures, scene)
            for outcome in kill_again_and_again(scene, ALONE_WORKER_KILLED, world, kills):
                book.enter_recovery(ALONE_WORKER_KILLED.name, launcher, outcome)
            return


def _enter_start(book: Book, scene: Scene, world: World, began_s: float) -> None:
    took_s = world.latest_s("collective") - began_s
    name = scene.launcher.name
    book.figures.of("start", name).add(took_s)
    progress(f"start, {name}: {took_s:.3f} s")
    if scene.launcher.keeps_journal:
        found = breakdown(START_STAGES, scene.journal(), world, began_s)
        book.start_stages.setdefault(f"start, {name}", []).append(found)


def _enter_memory(figures: Figures, scene: Scene) -> None:
    name = scene.launcher.name
    kinds = by_kind(scene, HOST)
    everything = [one for processes in kinds.values() for one in processes]
    for what, measure_mb in (("PSS", pss_mb), ("RSS", rss_mb)):
        figures.of(f"{what}: the job", name, "MB").add(measure_mb(everything))
        for kind, processes in kinds.items():
            label = f"{kind} ({WORKERS} of them)" if kind in ONE else kind
            total = measure_mb(processes)
            figures.of(f"{what}: {label}", name, "MB").add(total)
            if kind in ONE:
                figures.of(f"{what}: each {ONE[kind]}", name, "MB").add(total / len(processes))
