"""Workers that take optimizer steps without a process group are reported in one line; nothing is said of others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from elastic_agent.agent.reporting.training import Training
from elastic_agent.agent.supervisor import Supervisor
from elastic_agent.protocol.records import Address, Seat, World
from tests.agent.support import run
from tests.client.support import AGENT_ENVIRONMENT, launched
from tests.waiting import GUARD_S

WARNING = "every worker of this node takes optimizer steps without a process group"

STEPS = """
def train(steps):
    import torch
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(steps):
        weight.sum().backward()
        optimizer.step()
"""
MEETS = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
FORKS = """
import os
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
else:
    train(20)
    os._exit(0)
"""

SCRIPTS = {
    "trains": (f"{STEPS}import time, torch\ntrain(25)", True),
    "takes a few steps only": (f"{STEPS}train(9)", False),
    "has a group": (f"{MEETS}{STEPS}train(25)", False),
    "makes a group after some steps": (f"{STEPS}train(5)\n{MEETS}train(25)", False),
    "uses another package to share gradients": (f"import horovod\n{STEPS}train(25)", False),
    "trains in a process that it forks": (f"{STEPS}{FORKS}", False),
}


FORKS_WORKERS = """
import json, os, sys, torch
from elastic_agent.integrations import post_import

torch.optim.SGD([torch.ones(1, requires_grad=True)])  # imports what takes long
post_import.preload()
for slot, script in enumerate(json.loads(sys.stdin.read())):
    worker = os.fork()
    if worker == 0:
        os.environ["ELASTIC_AGENT_SLOT"] = str(slot)
        post_import.watch()
        exec(script, {"__name__": "__main__"})
        os._exit(0)
    assert os.waitpid(worker, 0)[1] == 0, script
"""


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Run all scripts as workers, and return those that tell the agent that they train alone, as often as they do."""
    folder = tmp_path_factory.mktemp("workers")
    (folder / "horovod.py").touch()
    name = f"test/{secrets.token_hex(8)}"
    variables = {**AGENT_ENVIRONMENT, "ELASTIC_AGENT_PROGRESS": name, "PYTHONPATH": str(folder)}
    scripts = [script for script, _ in SCRIPTS.values()]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(f"\0{name}")
        subprocess.run(
            [sys.executable, "-c", FORKS_WORKERS],
            input=json.dumps(scripts),
            env=launched(variables),
            text=True,
            check=True,
            timeout=GUARD_S,
        )
        agent.setblocking(False)
        messages = []
        with contextlib.suppress(BlockingIOError):
            while True:
                messages.append(json.loads(agent.recv(65536)))
    return [list(SCRIPTS)[message["slot"]] for message in messages if message.get("trains_alone")]


@pytest.mark.parametrize(("case", "tells"), [(case, tells) for case, (_, tells) in SCRIPTS.items()])
def test_a_worker_tells_once_that_it_takes_steps_without_a_group(
    heard: list[str], case: str, tells: bool
) -> None:
    assert heard.count(case) == tells


def world(workers: int, elsewhere: int = 0) -> World:
    seats = [Seat("a", "a-1", "127.0.0.1", workers, 0)]
    if elsewhere:
        seats.append(Seat("b", "b-1", "127.0.0.2", elsewhere, workers))
    return World(1, tuple(seats), Address("127.0.0.1", 1), "a")


@pytest.mark.parametrize(
    ("present", "alone", "is_told"),
    [
        (world(2), {0, 1}, True),
        (world(2), {1}, False),
        (world(1), {0}, False),
        (world(1, elsewhere=1), {0}, True),
        (None, {0, 1}, False),
    ],
    ids=["all", "one of two", "the only worker", "all of this node", "no world yet"],
)
def test_the_warning_is_given_once_if_all_workers_of_the_node_train_alone(
    present: World | None, alone: set[int], is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    async def warn() -> None:
        seat = present.seat_of("a-1") if present else None
        training = Training(cast(Supervisor, SimpleNamespace(world=present, seat=seat)))
        for _ in range(2):
            training.warn_of_copies(alone)

    asyncio.run(warn())
    assert "".join(capsys.readouterr()).count(WARNING) == is_told


def test_a_run_that_failed_before_its_first_step_has_no_goodput(tmp_path: Path) -> None:
    done = run(tmp_path, "import torhc", "--max-restarts", "0")
    assert done.returncode == 1
    assert "goodput " not in done.stderr
