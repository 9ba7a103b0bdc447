"""From a fault to the first collective of every rank of the new world, by kind of fault.

elastic-agent at its defaults (lease 5 s, margin 1 s, settle 1 s), torchrun tuned: at torchrun's defaults with
gloo none of these recovers within 150 s but the last two.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from .figures import Figure, Result
from .launchers import OURS, TORCHRUN_TUNED, Launcher
from .options import Options, progress
from .scene import EVERYBODY, HOST, PEER, SLOTS, NoWorldError, Scene, SpoiltError, World, boottime_s
from .stages import RECOVERY_STAGES, Stages, breakdown, median_stages

LEASE_S, MARGIN_S, SETTLE_S = 5.0, 1.0, 1.0
LIMIT_S = 60.0
TRIES = 4


@dataclass(frozen=True)
class Fault:
    """``strike`` does the harm and says when (CLOCK_BOOTTIME)."""

    name: str
    strike: Callable[[Scene, World], float]
    workers_after: int
    target_s: float | None
    nodes: tuple[str, ...] = (HOST, PEER)


def kill_worker(scene: Scene, world: World) -> float:
    """One of the two workers of the larger node, so that a neighbour and another node survive."""
    pid = next(pid for (node, rank), pid in world.pids.items() if node == HOST and rank != 0)
    at_s = boottime_s()
    os.kill(pid, signal.SIGKILL)
    return at_s


def kill_and_restart_host(scene: Scene, world: World) -> float:
    at_s = scene.kill_node(HOST)
    scene.start(HOST)
    return at_s


def terminate_agent(scene: Scene, world: World) -> float:
    at_s = boottime_s()
    scene.agents[PEER].send_signal(signal.SIGTERM)
    return at_s


FAULTS = (
    Fault("worker SIGKILL", kill_worker, EVERYBODY, 2.0),
    Fault(
        "node SIGKILL",
        lambda scene, world: scene.kill_node(PEER),
        SLOTS[HOST],
        LEASE_S + MARGIN_S + 2.0,
    ),
    Fault(
        "node frozen",
        lambda scene, world: scene.freeze_node(PEER),
        SLOTS[HOST],
        LEASE_S + MARGIN_S + 2.0,
    ),
    Fault("node joins", lambda scene, world: scene.start(PEER), EVERYBODY, SETTLE_S + 2.5, nodes=(HOST,)),
    Fault("SIGTERM to one agent", terminate_agent, SLOTS[HOST], None),
    Fault("store host SIGKILL, restarted", kill_and_restart_host, EVERYBODY, None),
)


def run(options: Options) -> Result:
    figures: dict[tuple[str, str], Figure] = {}
    stages: dict[str, list[Stages]] = {}
    for number in range(options.times):
        for fault in FAULTS:
            for launcher in (OURS, TORCHRUN_TUNED):
                figure = figures.setdefault(
                    (fault.name, launcher.name),
                    Figure(fault.name, launcher.name, "s", fault.target_s if launcher is OURS else None),
                )
                if number >= 2 and launcher is not OURS and len(figure.misses) >= 2:
                    continue  # it does not recover; another minute of waiting would tell nothing new
                outcome = measure(launcher, fault, stages.setdefault(fault.name, []))
                progress(f"{fault.name}, {launcher.name}: {outcome}")
                figure.add(outcome)
    medians = {name: median_stages(RECOVERY_STAGES, samples) for name, samples in stages.items()}
    return Result("recovery", list(figures.values()), tables={"stages": medians, "all_stages": stages})


def measure(launcher: Launcher, fault: Fault, stages: list[Stages]) -> float | str:
    why = ""
    for _ in range(TRIES):
        try:
            return _measure_once(launcher, fault, stages)
        except SpoiltError as spoilt:
            why = str(spoilt)
    return why


def _measure_once(launcher: Launcher, fault: Fault, stages: list[Stages]) -> float | str:
    with Scene(launcher) as scene:
        before = scene.settle_down(fault.nodes)
        struck_s = fault.strike(scene, before)
        try:
            after = scene.await_world(fault.workers_after, struck_s, LIMIT_S)
        except NoWorldError as error:
            return str(error)
        if launcher is not TORCHRUN_TUNED:
            stages.append(breakdown(RECOVERY_STAGES, scene.journal(), after, struck_s))
        return round(after.latest_s("collective") - struck_s, 3)
