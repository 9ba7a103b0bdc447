"""What an agent costs while training runs undisturbed: processor time and memory, the store's host and the other."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from .figures import Figure, Result
from .launchers import OURS, TORCHRUN_TUNED, Launcher
from .options import Options, progress
from .scene import HOST, PEER, Scene, SpoiltError

WATCH_S = 30.0
QUICK_WATCH_S = 20.0
PAUSE_S = 0.2
"""Between two rounds of the workers, so that they do not compete with what is measured."""
TRIES = 4


def run(options: Options) -> Result:
    figures: dict[tuple[str, str], Figure] = {}
    for _ in range(options.times):
        for launcher in (OURS, TORCHRUN_TUNED):
            for what, unit, value in measure(launcher, QUICK_WATCH_S if options.quick else WATCH_S):
                figures.setdefault((what, launcher.name), Figure(what, launcher.name, unit)).add(value)
            progress(f"at rest, {launcher.name}: measured")
    note = (
        "PSS counts memory shared with other processes in parts (the libraries' code, also used by the workers and "
        "the other agent); elastic-agent's figures are agent and guard together."
    )
    return Result("rest", sorted(figures.values(), key=lambda one: one.what), [note])


def measure(launcher: Launcher, watch_s: float) -> list[tuple[str, str, float]]:
    for _ in range(TRIES):
        with Scene(launcher, PAUSE_S) as scene:
            try:
                scene.settle_down((HOST, PEER))
            except SpoiltError:
                continue
            return _watch(scene, watch_s)
    return []


def _watch(scene: Scene, watch_s: float) -> list[tuple[str, str, float]]:
    workers = scene.worker_pids()
    found: list[tuple[str, str, float]] = []
    own = {node: [one for one in scene.processes(node) if one.pid not in workers] for node in scene.agents}
    before = {node: _total(processes, _cpu_s) for node, processes in own.items()}
    began_s = time.monotonic()
    time.sleep(watch_s)
    for node, processes in own.items():
        used_s = _total(processes, _cpu_s) - before[node]
        share = 100 * used_s / (time.monotonic() - began_s)
        found.append((f"{node}: processor", "% of a core", share))
        found.append((f"{node}: RSS", "MB", _total(processes, lambda one: one.memory_info().rss / 1e6)))
        found.append((f"{node}: PSS", "MB", _total(processes, lambda one: one.memory_full_info().pss / 1e6)))
    return found


def _total(processes: list[psutil.Process], measure_one: Callable[[psutil.Process], float]) -> float:
    return sum(measure_one(one) for one in processes)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
