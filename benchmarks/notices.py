"""From a signal to one agent until every agent has told its workers, all have left, and what follows.

The workers heed notices: all ranks agree on a round (``client.Agreement``), which in this scene takes a round or two
of 10 ms, and leave; nothing is saved, so what saving takes comes on top.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import psutil

from .figures import Figures, Result
from .launchers import OURS
from .options import Options, progress
from .scene import BOTH, HOST, PEER, Event, NoWorldError, Scene, SpoiltError, boottime_s

TOLD_TARGET_S = 0.1
LIMIT_S = 30.0
TRIES = 3
HANDLING_NOTICES = replace(OURS, environment={**OURS.environment, "BENCH_HEEDS": "1"})


def run(options: Options) -> Result:
    figures = Figures()
    for _ in range(options.times):
        for what, signum in (("the run ends", signal.SIGUSR1), ("one node leaves", signal.SIGTERM)):
            _once(figures, what, signum)
            progress(f"{what}: measured")
    return Result("notices", list(figures))


def _once(figures: Figures, what: str, signum: signal.Signals) -> None:
    for _ in range(TRIES):
        with Scene(HANDLING_NOTICES) as scene:
            try:
                scene.settle_down(BOTH)
            except SpoiltError:
                continue
            _strike(figures, scene, what, signum)
            return


def _strike(figures: Figures, scene: Scene, what: str, signum: signal.Signals) -> None:
    def enter(stage: str, at_s: float, target_s: float | None = None) -> None:
        figures.of(f"{what}: {stage}", HANDLING_NOTICES.name, target=target_s).add(at_s - struck_s)

    struck_s = boottime_s()
    os.kill(scene.agents[PEER].pid, signum)
    if signum == signal.SIGUSR1:
        psutil.wait_procs(list(scene.agents.values()), timeout=LIMIT_S)
        enter("all agents have ended", boottime_s())
    else:
        try:
            after = scene.await_world(scene.size((HOST,)), struck_s, LIMIT_S)
        except NoWorldError as error:
            figures.of(f"{what}: the others go on", HANDLING_NOTICES.name).add(str(error))
            return
        enter("the others go on", after.latest_s("collective"))
    enter("all agents have told their workers", _latest(scene.journal(), "notice", struck_s), TOLD_TARGET_S)
    enter("all workers have left", _latest(scene.events(), "left", struck_s))


def _latest(events: list[Event], kind: str, after_s: float) -> float:
    return max(one["boottime_s"] for one in events if one["event"] == kind and one["boottime_s"] > after_s)
