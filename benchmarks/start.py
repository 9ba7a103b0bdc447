"""From launch to every rank's first collective: two agents started at once, two workers on one, one on the other."""

from __future__ import annotations

from .figures import Figure, Result
from .launchers import OURS, TORCHRUN, TORCHRUN_FIXED, TORCHRUN_TUNED, Launcher
from .options import Options, progress
from .scene import EVERYBODY, HOST, PEER, NoWorldError, Scene
from .stages import START_STAGES, Stages, breakdown, median_stages

TARGET_S = 6.0
LIMIT_S = 90.0


def run(options: Options) -> Result:
    figures: dict[str, Figure] = {}
    stages: list[Stages] = []
    for number in range(options.times):
        launchers = [OURS, TORCHRUN_TUNED, TORCHRUN_FIXED]
        launchers += [TORCHRUN] if number == 0 and not options.quick else []  # half a minute: once is enough
        for launcher in launchers:
            outcome = measure(launcher, stages)
            progress(f"start, {launcher.name}: {outcome}")
            target = TARGET_S if launcher is OURS else None
            figures.setdefault(launcher.name, Figure("start", launcher.name, "s", target)).add(outcome)
    tables = {"stages": {"start": median_stages(START_STAGES, stages)}, "all_stages": stages}
    return Result("start", list(figures.values()), tables=tables)


def measure(launcher: Launcher, stages: list[Stages]) -> float | str:
    with Scene(launcher) as scene:
        began_s = scene.start(HOST)
        scene.start(PEER)
        try:
            world = scene.await_world(EVERYBODY, began_s, LIMIT_S)
        except NoWorldError as error:
            return str(error)
        if launcher is OURS:
            stages.append(breakdown(START_STAGES, scene.journal(), world, began_s))
        return round(world.latest_s("collective") - began_s, 3)
