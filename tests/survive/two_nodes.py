"""A run of two nodes with two workers each, which are kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cli.support import COMMAND, clean_environment
from tests.ports import free_port
from tests.waiting import GUARD_S, wait_for

SCRIPT = """
import hashlib, json, os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from elastic_agent import client, survive

folder = sys.argv[1]
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
state = survive.State(model=model, optimizer=optimizer)
me = client.current()
name = f"{me.node_id}.{me.slot}"
is_first = not os.path.exists(f"{folder}/{name}")


def tell(**facts):
    with open(f"{folder}/{name}", "a") as file:
        file.write(json.dumps({"pid": os.getpid(), **facts}) + "\\n")


tell(begun=True)
print(f"{name} begins", flush=True)
while not (is_first or os.path.exists(f"{folder}/may_be_replaced")):
    time.sleep(0.01)


@survive.train(state)
def train(world):
    ddp = world.ddp(model)
    generation = client.current().placement.generation
    print(f"{name} is in generation {generation}", flush=True)
    open_files = len(os.listdir("/proc/self/fd"))
    tell(world=generation, size=world.world_size, step=state.step, open_files=open_files)
    while True:
        ends = torch.tensor([float(os.path.exists(f"{folder}/end"))])
        dist.all_reduce(ends)
        if ends.item():
            return
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * state.step + world.rank))
        ddp(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        tell(done=state.step)
        time.sleep(0.01)


train()
parameters = [*model.parameters(), *(each["exp_avg"] for each in optimizer.state.values())]
tell(digest=hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in parameters)).hexdigest())
"""
SLOTS = ("A.0", "A.1", "B.0", "B.1")


class Run:
    """The agents of nodes A and B, each on its own, and what their workers have told."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self._script = folder / "train.py"
        self._script.write_text(SCRIPT)
        self._options = options
        self._endpoint = f"127.0.0.1:{free_port()}"
        self.agents: dict[str, subprocess.Popen[str]] = {}

    def start(self, node: str) -> None:
        """Start the agent of a node."""
        state, logs = self.folder / f"state-{node}", self.folder / "logs"
        command = [*COMMAND, "--rdzv-endpoint", self._endpoint, "--rdzv-id", "run", "--node-id", node]
        command += ["--nnodes", "1:2", "--nproc-per-node", "2", "--survive", "keep", *self._options]
        command += ["--state-dir", str(state), "--log-dir", str(logs), str(self._script), str(self.folder)]
        self.agents[node] = subprocess.Popen(command, env=clean_environment({}))

    def told(self, slot: str) -> list[dict[str, Any]]:
        """What the worker in this slot has told, over all its processes."""
        path = self.folder / slot
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def of(self, slot: str, key: str) -> list[Any]:
        """What it has told of one thing."""
        return [fact[key] for fact in self.told(slot) if key in fact]

    def pids(self, slot: str) -> list[int]:
        """The processes that the slot has had."""
        return [*dict.fromkeys(fact["pid"] for fact in self.told(slot))]

    def kill(self, slot: str) -> None:
        """Kill its worker."""
        os.kill(self.pids(slot)[-1], signal.SIGKILL)

    def place(self, slot: str) -> tuple[int, int] | None:
        """Return generation and size of the world in which the slot trains; None: it has not taken a step there yet."""
        told = self.told(slot)
        worlds = [fact for fact in told if "world" in fact]
        return (worlds[-1]["world"], worlds[-1]["size"]) if told and "done" in told[-1] else None

    def await_training(self, *slots: str, since: int = 0) -> int:
        """Wait until these, and no others, train in a generation above ``since``, and return that."""

        def together() -> int | None:
            places = {self.place(slot) for slot in slots}
            place = places.pop()
            if places or place is None or place[1] != len(slots):
                return None
            return place[0] if place[0] > since else None

        return wait_for(f"{slots} to train", together)

    def end(self) -> None:
        """Have the training end, and wait for it."""
        (self.folder / "end").touch()
        for agent in self.agents.values():
            assert agent.wait(GUARD_S) == 0


@contextmanager
def running(folder: Path, *options: str) -> Iterator[Run]:
    run = Run(folder, *options)
    try:
        yield run
    finally:
        for agent in run.agents.values():
            agent.kill()
            agent.wait()
