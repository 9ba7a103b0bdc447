"""State from memory: copies beside torch.save, reading beside torch.load, recoveries beside those from a checkpoint.

And workers that are kept: a worker of two nodes with two each is killed, and its node makes way until another one is
there; a node joins.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from elastic_agent import survive
from elastic_agent.agent.worker_group.factory import StateMemory
from elastic_agent.survive._memory import Memory
from elastic_agent.survive._packing import pack, unpack

from .figures import REPOSITORY, Figure, Figures, Options, Result, progress, ratio
from .launchers import OURS, TORCHRUN_TUNED, Launcher, elastic_agent, running
from .scene import BOTH, HOST, PEER, Scene, boottime_s

EXAMPLE = REPOSITORY / "examples" / "survive_ddp.py"
TWO_EACH = {HOST: 2, PEER: 2}
LAUNCHERS = [
    running(launcher, "surviving.py")
    for launcher in (elastic_agent("kept", "1:2", "--survive", "keep"), OURS, TORCHRUN_TUNED)
]
KEPT = LAUNCHERS[0]
STARTS_S = (0.0, 2.0)
"""The time that the script takes before it trains, where a worker is killed."""
KILLED, WHOLE = "killed worker, next step", "killed worker, next step of all four"
JOINED = "node joins, pause"
CALM_S = 1.5
LIMIT_S = 60.0
LAYERS, WIDTH = 40, 1020
"""Of the model: 167 MB of parameters, and twice that in the optimizer."""
FAIL_AT = 50
COPY, READ, RECOVERY = "copy 500 MB", "read 500 MB", f"failure of all ranks to step {FAIL_AT + 1}"
WITHOUT_MEMORY = f"""import os, runpy
os.environ.pop("ELASTIC_AGENT_STATE_MEMORY", None)
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""


def run(options: Options) -> Result:
    figures = Figures()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.times):
            _copies(figures, Path(folder))
        for number in range(2 if options.quick else options.runs):
            for who, checkpoint_every in (("memory", 10**6), ("checkpoint of step 40", 20)):
                _recover(figures, Path(folder, f"{who} {number}"), who, checkpoint_every)
    for _ in range(options.runs):
        for launcher in LAUNCHERS:
            for start_s in STARTS_S:
                _kill(figures, launcher, start_s)
            _join(figures, launcher)
    note = "torch.load reads from the page cache, not from a disk; memory and files were used before."
    ratios = [
        *ratio(figures.of(COPY, "memory"), figures.of(COPY, "torch.save")),
        *ratio(figures.of(READ, "memory"), figures.of(READ, "torch.load")),
        *ratio(figures.of(RECOVERY, "memory"), figures.of(RECOVERY, "checkpoint of step 40")),
        *(
            found
            for start_s in STARTS_S
            for other, target in ((OURS, 5.0), (TORCHRUN_TUNED, 80.0))
            for found in ratio(
                _of(figures, KILLED, KEPT, start_s), _of(figures, KILLED, other, start_s), target
            )
        ),
    ]
    return Result("survive", list(figures), [note], ratios)


def _copies(figures: Figures, folder: Path) -> None:
    """Copy and read one state in both ways, after each was done twice; with one thread, as the workers of a node."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    state = survive.State(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    state.parts["optimizer"].step()
    file = folder / "state.pt"
    with closing(StateMemory(1)) as held:
        memory = Memory(held.paths[0].split(":"), bytes(32), 1)

        def copy() -> None:
            state.step += 1
            memory.write(state.step, pack(state.state_dict()))

        def read() -> None:
            found = memory.newest()
            assert found is not None
            state.restore(unpack(memory.view(found), found.skeleton_size))

        steps: list[tuple[str, str, Callable[[], None]]] = [
            (COPY, "memory", copy),
            (COPY, "torch.save", lambda: state.save(file)),
            (READ, "memory", read),
            (READ, "torch.load", lambda: state.restore(torch.load(file, weights_only=True))),
        ]
        for what, who, do in steps:
            do()
            do()  # a copy goes to the other file
            start_s = time.perf_counter()
            do()
            figures.of(what, who).add(time.perf_counter() - start_s)
            progress(f"{what}, {who}: {figures.of(what, who).samples[-1]:.3f} s")


def _recover(figures: Figures, folder: Path, who: str, checkpoint_every: int) -> None:
    """Train with two workers that both raise, and measure until the step in which they did is done."""
    folder.mkdir()
    script = EXAMPLE
    if who != "memory":
        script = folder / "without_memory.py"
        script.write_text(WITHOUT_MEMORY)
    agent = [
        sys.executable,
        "-m",
        "elastic_agent",
        "--state-dir",
        str(folder),
        "--nproc-per-node",
        "2",
        str(script),
    ]
    options = [
        "--checkpoint-dir",
        str(folder),
        "--checkpoint-every",
        str(checkpoint_every),
        "--fail-at",
        str(FAIL_AT),
    ]
    failed_s = done_s = None
    with subprocess.Popen(
        [*agent, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if failed_s is None and "an error to recover from" in line:
                failed_s = time.perf_counter()
            if re.match(rf"step={FAIL_AT + 1} ", line):
                done_s = time.perf_counter()
    assert failed_s is not None
    assert done_s is not None
    figures.of(RECOVERY, who).add(done_s - failed_s)
    progress(f"{RECOVERY}, {who}: {done_s - failed_s:.3f} s")


def _of(figures: Figures, what: str, launcher: Launcher, start_s: float) -> Figure:
    return figures.of(f"{what}; script starts in {start_s:g} s", launcher.name)


def _kill(figures: Figures, launcher: Launcher, start_s: float) -> None:
    """Kill a worker, and measure until the next step is done in the next world, and in one of all four."""
    environment = {**launcher.environment, "BENCH_START_S": str(start_s)}
    with Scene(replace(launcher, environment=environment), slots=TWO_EACH) as scene:
        world = scene.settle_down(BOTH)
        time.sleep(CALM_S)
        last = max(rank for node, rank in world.pids if node == PEER)
        struck_s = boottime_s()
        os.kill(world.pids[PEER, last], signal.SIGKILL)
        whole = scene.await_world(4, struck_s, LIMIT_S)
        others = scene.find_world(2, struck_s)  # none where workers are not kept
        for what, next_world in ((KILLED, others or whole), (WHOLE, whole)):
            took_s = next_world.latest_s("collective") - struck_s
            _of(figures, what, launcher, start_s).add(took_s)
            progress(f"{what}, {launcher.name}, started in {start_s:g} s: {took_s:.3f} s")


def _join(figures: Figures, launcher: Launcher) -> None:
    """Let a node join, and measure for how long the other one makes no step."""
    with Scene(launcher, slots=TWO_EACH) as scene:
        before = scene.settle_down((HOST,))
        after = scene.await_world(4, scene.start(PEER), LIMIT_S)
        if launcher is KEPT:
            pause_s = max(pause["seconds"] for pause in scene.told("pause"))
        else:
            pause_s = scene.interruption_s(before, after, (HOST,))
        figures.of(JOINED, launcher.name).add(pause_s)
        progress(f"{JOINED}, {launcher.name}: {pause_s:.3f} s")
