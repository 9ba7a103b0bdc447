"""From launch to every rank's first collective: two agents started at once, two workers on one, one on the other.

Like with like: with ``2:2`` no third node is awaited, with ``1:4`` the settle time (torchrun: its last call)
is part of every start.
"""

from __future__ import annotations

from .figures import Figures, Options, Result, import_torch_s, progress, ratio
from .launchers import OURS, OURS_FIXED, TORCHRUN, TORCHRUN_FIXED, TORCHRUN_TUNED, Launcher
from .scene import BOTH, HOST, PEER, NoWorldError, Scene
from .stages import START_STAGES, Stages, breakdown, median_stages

FASTER_AT_LEAST = 2.0
LIMIT_S = 90.0
TRIES = 3
"""Of each thing in a quick run."""


def run(options: Options) -> Result:
    figures = Figures()
    stages: dict[str, list[Stages]] = {}
    for number in range(TRIES if options.quick else options.runs):
        launchers = [OURS_FIXED, TORCHRUN_FIXED, OURS, TORCHRUN_TUNED]
        launchers += [TORCHRUN] if number == 0 and not options.quick else []  # half a minute: once is enough
        for launcher in launchers:
            outcome = measure(launcher, stages)
            progress(f"start, {launcher.name}: {outcome}")
            figures.of("start", launcher.name).add(outcome)
        figures.of("import torch, alone", "python").add(import_torch_s())
    ours, theirs = (figures.of("start", launcher.name) for launcher in (OURS_FIXED, TORCHRUN_FIXED))
    if theirs.median is not None:
        ours.target = theirs.median / FASTER_AT_LEAST
    ratios = [*ratio(ours, theirs, FASTER_AT_LEAST)]
    ratios += ratio(figures.of("start", OURS.name), figures.of("start", TORCHRUN_TUNED.name))
    medians = {name: median_stages(START_STAGES, samples) for name, samples in stages.items()}
    tables = {"start_stages": medians, "all_stages": stages}
    return Result("start", list(figures), ratios=ratios, tables=tables)


def measure(launcher: Launcher, stages: dict[str, list[Stages]]) -> float | str:
    with Scene(launcher) as scene:
        began_s = scene.start(HOST)
        scene.start(PEER)
        try:
            world = scene.await_world(scene.size(BOTH), began_s, LIMIT_S)
        except NoWorldError as error:
            return str(error)
        if launcher.keeps_journal:
            found = breakdown(START_STAGES, scene.journal(), world, began_s)
            stages.setdefault(launcher.name, []).append(found)
        return round(world.latest_s("collective") - began_s, 4)
