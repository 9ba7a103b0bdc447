"""Workers that outlive their world: they keep process and state, go on in the next one, and no step is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.worker_variables import SURVIVE_GPU
from tests.cli.support import COMMAND, LONG_LEASE, clean_environment
from tests.waiting import GUARD_S, wait_for

pytestmark = pytest.mark.system

STEPS = 12
STOPS_AT = 5
"""Slot 1 waits there, in the first generation, until it is killed or told to go on."""
SCRIPT = f"""
import hashlib, json, os, signal, socket, sys, time
import torch
import torch.distributed as dist
from torch import nn
from elastic_agent import client, survive

folder, how = sys.argv[1:]
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scaler = {{"scaler": torch.amp.GradScaler("cpu")}} if how == "a gradient scaler" else {{}}
optimizers = {{}} if how == "no optimizer" else {{"optimizer": optimizer}}
state = survive.State(model=model, **optimizers, **scaler)
slot = client.current().slot
pid = os.getpid()
if how == "a GPU":
    torch.cuda.is_available = lambda: True


def tell(**facts):
    with open(f"{{folder}}/{{slot}}", "a") as file:
        file.write(json.dumps({{"pid": pid, **facts}}) + "\\n")


@survive.train(state)
def train(world):
    ddp = world.ddp(model)
    if how == "another group":
        dist.new_group()
    placement = client.current().placement
    print(f"slot {{slot}} is in generation {{placement.generation}}", flush=True)
    tell(world=placement.generation, rank=world.rank, variable=int(os.environ["RANK"]), step=state.step)
    while state.step < {STEPS}:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * state.step + world.rank))
        loss = ddp(inputs).square().mean()
        if state.step == {STOPS_AT} and slot == 1 and placement.first_generation and how != "connections break":
            tell(stands=True)
            signal.pause()
        if state.step == {STOPS_AT} and how == "all raise" and placement.first_generation:
            raise RuntimeError("gloo/a mistake in the script: Connection closed by peer")
        if state.step == {STOPS_AT} and how == "connections break" and placement.first_generation:
            for number in range(3, 200):
                try:
                    connection = socket.socket(fileno=os.dup(number))
                    if connection.family == socket.AF_INET and connection.getpeername():
                        connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        tell(done=state.step)


if how == "another training":
    other = nn.Linear(1, 1)

    @survive.train(survive.State(other=other))
    def train_before(world):
        world.ddp(other)(torch.ones(1, 1)).sum().backward()

    train_before()
if how == "a group before":
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
train()
values = [value for value in model.state_dict().values() if value.dtype.is_floating_point]
tell(digest=hashlib.sha256(b"".join(value.numpy().tobytes() for value in values[:2])).hexdigest())
"""


class Run:
    """A run of one agent with three workers."""

    def __init__(self, folder: Path, how: str, variables: dict[str, str]) -> None:
        self.folder = folder
        script = folder / "train.py"
        script.write_text(SCRIPT)
        command = [*COMMAND, "--state-dir", str(folder / "state"), "--log-dir", str(folder / "logs")]
        arguments = ["--nproc-per-node", "3", "--redirects", "0:1", str(script), str(folder), how]
        self.agent = subprocess.Popen(
            [*command, *arguments],
            env=clean_environment({**LONG_LEASE, **variables}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def told(self, slot: int) -> list[dict[str, Any]]:
        """What the worker in this slot has told, over all generations."""
        path = self.folder / str(slot)
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def pids(self, slot: int) -> list[int]:
        """The processes that the slot has had."""
        return [*dict.fromkeys(fact["pid"] for fact in self.told(slot))]

    def kill_the_one_that_stands(self) -> None:
        wait_for("the worker to stand", lambda: any("stands" in fact for fact in self.told(1)))
        wait_for("the others", lambda: all({"done": STOPS_AT} in _facts(self.told(slot)) for slot in (0, 2)))
        os.kill(self.pids(1)[0], signal.SIGKILL)

    def end(self) -> str:
        """Wait for the end, and return the output."""
        output, _ = self.agent.communicate(timeout=GUARD_S)
        assert self.agent.returncode == 0, output
        return output


def _facts(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in fact.items() if key != "pid"} for fact in told]


@contextmanager
def run(folder: Path, how: str = "one is killed", **variables: str) -> Iterator[Run]:
    running = Run(folder, how, {"ELASTIC_AGENT_SURVIVE": "keep", **variables})
    try:
        yield running
    finally:
        running.agent.kill()
        running.agent.communicate()


@pytest.mark.parametrize(("how", "variables"), [("one is killed", {}), ("a GPU", {SURVIVE_GPU: "1"})])
def test_workers_outlive_one_that_is_killed_and_no_step_is_lost(
    tmp_path: Path, how: str, variables: dict[str, str]
) -> None:
    with run(tmp_path, how, **variables) as training:
        training.kill_the_one_that_stands()
        training.end()
        assert [len(training.pids(slot)) for slot in range(3)] == [1, 2, 1]
        for slot in (0, 2):
            steps = [fact["done"] for fact in training.told(slot) if "done" in fact]
            assert steps == list(range(1, STEPS + 1)), "each step once"
        worlds = [fact for fact in training.told(0) if "world" in fact]
        assert [(fact["world"], fact["step"]) for fact in worlds] == [(1, 0), (2, STOPS_AT)]
        assert all(fact["rank"] == fact["variable"] for fact in worlds)
        assert len({training.told(slot)[-1]["digest"] for slot in range(3)}) == 1
        # The output of each generation is in its own file.
        files = sorted((tmp_path / "logs").glob("run-*/00000[12]/*/0/stdout.log"))
        assert [file.read_text() for file in files] == [f"slot 0 is in generation {n}\n" for n in (1, 2)]


@pytest.mark.parametrize(
    ("how", "survive"),
    [
        ("one is killed", ""),
        ("another training", "keep"),
        ("a group before", "keep"),
        ("another group", "keep"),
        ("a gradient scaler", "keep"),
        ("no optimizer", "keep"),
        ("a GPU", "keep"),
    ],
)
def test_workers_are_started_again_unless_they_are_to_be_kept_and_can_be(
    tmp_path: Path, how: str, survive: str
) -> None:
    with run(tmp_path, how, ELASTIC_AGENT_SURVIVE=survive) as training:
        training.kill_the_one_that_stands()
        output = training.end()
        assert [len(training.pids(slot)) for slot in range(3)] == [2, 2, 2]
        assert ("--survive keep is for CPUs" in output) == (how == "a GPU")


def test_a_worker_with_an_error_of_its_own_is_started_again(tmp_path: Path) -> None:
    with run(tmp_path, "all raise") as training:
        wait_for("the worker to stand", lambda: any("stands" in fact for fact in training.told(1)))
        output = training.end()
        assert "a mistake in the script" in output
        assert [len(training.pids(slot)) for slot in (0, 2)] == [2, 2]


def test_connections_that_break_while_no_worker_is_lost_end_workers_with_their_own_error(
    tmp_path: Path,
) -> None:
    with run(tmp_path, "connections break", ELASTIC_AGENT_LEASE_TTL="2") as training:
        output = training.end()
        assert "loss.backward()" in output
        assert "pair.cc" in output
        assert [len(training.pids(slot)) for slot in range(3)] == [2, 2, 2]


def test_workers_that_do_not_park_are_started_again(tmp_path: Path) -> None:
    """One that stands in its script cannot leave it; it is killed, as it was before."""
    with run(tmp_path) as training:
        wait_for("the worker to stand", lambda: any("stands" in fact for fact in training.told(1)))
        wait_for(
            "the others", lambda: all({"done": STOPS_AT} in _facts(training.told(slot)) for slot in (0, 2))
        )
        os.kill(training.pids(0)[0], signal.SIGKILL)
        training.end()
        assert [len(training.pids(slot)) for slot in range(3)] == [2, 2, 1]


def test_nothing_is_left_of_parked_workers_when_the_agent_is_killed(tmp_path: Path) -> None:
    with run(tmp_path) as training:
        training.kill_the_one_that_stands()
        wait_for("the next world", lambda: any(fact.get("world") == 2 for fact in training.told(0)))
        training.agent.kill()
        workers = [training.pids(0)[0], training.pids(2)[0]]
        wait_for("their ends", lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers))
