"""What an agent costs while training runs undisturbed: processor time, memory, and what it asks of the store.

Processor and memory: two nodes with workers, the store's host and the other. The store's traffic: many nodes without
workers in a network namespace of their own, so that all traffic on its loopback is theirs.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import psutil

from elastic_agent.agent.worker_group.connection_watch import WATCH_S
from elastic_agent.testing.ports import free_port

from .figures import Figures, Result
from .launchers import OURS, TORCHRUN_TUNED, Launcher
from .options import Options, progress
from .processes import by_kind, processor_s, pss_mb, rss_mb
from .rendezvous import Crowd
from .scene import HOST, PEER, Scene, SpoiltError

MEASURE_S = 60.0
QUICK_MEASURE_S = 10.0
CALM_S = 3.0
"""After the workers' first rounds: what belongs to the start is over."""
SETTLED_S = WATCH_S + 10.0
"""In the first minutes of a generation our agent also watches the connections and the first steps of its workers."""
PAUSE_S = 0.2
"""Between two rounds of the workers, so that they do not compete with what is measured."""
TRIES = 4
PROCESSOR_TARGET = 0.2
SIZES = (8, 64)
TORCH = "torch c10d"
COST_NOTE = (
    "PSS counts memory shared with other processes in parts: what agent, guard, spawner, standbys and the workers "
    "have in common is divided among them. Processor: all of a node's processes but the workers."
)
TRAFFIC_NOTE = (
    "Traffic: bytes over the loopback, each counted once, acknowledgements included; torch's handlers are also asked "
    "every 0.1 s whether nodes wait, as torchrun's agents ask them."
)
NO_TRAFFIC_NOTE = "Traffic is not measured: this needs a network namespace of its own (root)."


def run(options: Options) -> Result:
    figures = Figures()
    measure_s = QUICK_MEASURE_S if options.quick else MEASURE_S
    for _ in range(options.times):
        for launcher in (OURS, TORCHRUN_TUNED):
            _cost(figures, launcher, measure_s, settles=not options.quick)
            progress(f"at rest, {launcher.name}: measured")
    if options.isolated:
        note = TRAFFIC_NOTE
        for _ in range(options.times):
            for who in (OURS.name, TORCH):
                _traffic(figures, who, measure_s)
        _not_more_with_more_nodes(figures)
    else:
        note = NO_TRAFFIC_NOTE
    return Result("rest", sorted(figures, key=lambda one: one.what), [COST_NOTE, note])


# --- processor and memory -------------------------------------------------------------------------


def _cost(figures: Figures, launcher: Launcher, measure_s: float, *, settles: bool) -> None:
    """``settles``: measure the time after the first minutes, too."""
    for _ in range(TRIES):
        with Scene(launcher, PAUSE_S) as scene:
            try:
                scene.settle_down((HOST, PEER))
            except SpoiltError:
                continue
            began_s = time.monotonic()
            time.sleep(CALM_S)
            _processor(figures, scene, measure_s, "first minutes")
            if settles:
                time.sleep(began_s + SETTLED_S - time.monotonic())
                _processor(figures, scene, measure_s, "at rest")
            _memory(figures, scene)
            return


def _own(scene: Scene, node: str) -> list[psutil.Process]:
    """All of a node's processes but the workers."""
    kinds = by_kind(scene, node).items()
    return [one for kind, processes in kinds if kind != "workers" for one in processes]


def _processor(figures: Figures, scene: Scene, measure_s: float, when: str) -> None:
    own = {node: _own(scene, node) for node in scene.agents}
    before = {node: processor_s(processes) for node, processes in own.items()}
    began_s = time.monotonic()
    time.sleep(measure_s)
    elapsed_s = time.monotonic() - began_s
    used_s = {node: processor_s(processes) - before[node] for node, processes in own.items()}
    target = PROCESSOR_TARGET if scene.launcher is OURS and when == "at rest" else None
    for node in own:
        what = f"{node}: processor, {when}"
        share = 100 * used_s[node] / elapsed_s
        figures.of(what, scene.launcher.name, "% of a core", target).add(share)


def _memory(figures: Figures, scene: Scene) -> None:
    who = scene.launcher.name
    for node in scene.agents:
        own = _own(scene, node)
        figures.of(f"{node}: RSS, all", who, "MB").add(rss_mb(own))
        figures.of(f"{node}: PSS, all", who, "MB").add(pss_mb(own))
        for kind, of_kind in by_kind(scene, node).items():
            figures.of(f"{node}: PSS, {kind}", who, "MB").add(pss_mb(of_kind))


# --- the store's traffic --------------------------------------------------------------------------


def _traffic(figures: Figures, who: str, measure_s: float) -> None:
    for size in SIZES:
        outcome = traffic_at_rest(size, who, measure_s)
        progress(f"{size} nodes at rest, {who}: {outcome} B/s per node")
        figures.of(_traffic_of(size), who, "B/s").add(outcome)


def _traffic_of(size: int) -> str:
    return f"store traffic per node, {size:2} nodes"


def traffic_at_rest(size: int, who: str, measure_s: float) -> float | str:
    """Bytes per second and node while so many nodes of a world have nothing to do."""
    with tempfile.TemporaryDirectory(prefix="elastic-agent-benchmark-") as folder:
        port = str(free_port())
        command = ["benchmarks.many_nodes", "0", str(size), str(size), port, str(Path(folder))]
        if who == TORCH:
            command = ["benchmarks.many_handlers", str(size), port, "--ask"]
        with Crowd([command]) as crowd:
            try:
                crowd.hear("here")
                crowd.say("begin")
                crowd.hear("calm")
            except EOFError:
                return "no world"
            time.sleep(CALM_S)
            before, began_s = _loopback_bytes(), time.monotonic()
            time.sleep(measure_s)
            return round((_loopback_bytes() - before) / (time.monotonic() - began_s) / size, 1)


def _loopback_bytes() -> int:
    """What has crossed this network namespace's loopback (/sys would show the namespace in which it was mounted)."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[0])
    raise RuntimeError("/proc/self/net/dev: expected a line for lo")


def _not_more_with_more_nodes(figures: Figures) -> None:
    few, many = (figures.of(_traffic_of(size), OURS.name, "B/s") for size in SIZES)
    if few.samples:
        many.target = statistics.median(few.samples)
