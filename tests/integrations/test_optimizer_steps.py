"""The optimizer steps that are counted in a script which says nothing of its steps."""

from __future__ import annotations

import subprocess
import textwrap
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from elastic_agent.client._cells import HeartbeatFile
from tests.client.support import SLOT, run_script, under_agent

BEGIN = """
from elastic_agent.integrations import post_import
post_import.watch()
import torch
from torch import optim

model = torch.nn.Linear(4, 1)

def losses(model=model):
    model.zero_grad()
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    return loss
"""

CASES = {
    "SGD": (
        """
        optimizer = optim.SGD(model.parameters(), 0.1)
        for _ in range(12):
            losses(), optimizer.step()
        """,
        12,
    ),
    "a closure that is called five times": (
        """
        optimizer = optim.LBFGS(model.parameters(), max_iter=5)
        for _ in range(12):
            optimizer.step(losses)
        """,
        12,
    ),
    "accumulated gradients": (
        """
        optimizer = optim.AdamW(model.parameters())
        for batch in range(12):
            losses()
            if batch % 4 == 3:
                optimizer.step()
        """,
        3,
    ),
    "steps that a scaler leaves out": (
        """
        optimizer, scaler = optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
        for batch in range(12):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).sum() * (float("inf") if batch % 4 == 3 else 1)).backward()
            scaler.step(optimizer), scaler.update()
        """,
        9,
    ),
    "a step within a step": (
        """
        class Logged(optim.SGD):
            def step(self, closure=None):
                return super().step(closure)
        optimizer = Logged(model.parameters(), 0.1)
        for _ in range(12):
            losses(), optimizer.step()
        """,
        12,
    ),
    "an optimizer around another": (
        """
        class Around(optim.Optimizer):
            def __init__(self, inner):
                super().__init__(model.parameters(), {})
                self.inner = inner
            def step(self, closure=None):
                self.inner.step(closure)
        optimizer = Around(optim.SGD(model.parameters(), 0.1))
        for _ in range(12):
            losses(), optimizer.step()
        """,
        12,
    ),
    "five steps of one network for one of the other": (
        """
        first, second = optim.SGD(model.parameters(), 0.1), optim.SGD(model.parameters(), 0.1)
        for _ in range(12):
            losses(), [first.step() for _ in range(5)], second.step()
        losses(), first.step()
        """,
        73,
    ),
    "a step that raises": (
        """
        optimizer = optim.SGD(model.parameters(), 0.1)
        for batch in range(12):
            try:
                optimizer.step(lambda: losses() if batch % 4 else 1 / 0)
            except ZeroDivisionError:
                pass
        """,
        9,
    ),
    "an optimizer that comes later": (
        """
        for _ in range(2):
            optimizer = optim.SGD(model.parameters(), 0.1)
            kept = (globals().get("kept"), optimizer)
            for _ in range(20):
                losses(), optimizer.step()
        """,
        40,
    ),
    "compiled steps": (
        """
        optimizer = optim.SGD(model.parameters(), 0.1)
        step = torch.compile(optimizer.step, backend="eager")
        for _ in range(12):
            losses(), step()
        """,
        0,
    ),
    "many threads with optimizers of their own": (
        """
        import sys, threading
        sys.setswitchinterval(1e-6)
        weights = [torch.zeros(1, requires_grad=True) for _ in range(40)]
        for weight in weights:
            weight.grad = torch.ones(1)
        def train(own):
            optimizers = [optim.SGD([weight], 0.1) for weight in own]
            for _ in range(12):
                [optimizer.step() for optimizer in optimizers]
        threads = [threading.Thread(target=train, args=(weights[number::4],)) for number in range(4)]
        [thread.start() for thread in threads], [thread.join() for thread in threads]
        """,
        None,
    ),
    "a step that is compiled with the rest, and never again": (
        """
        optimizer = optim.SGD(model.parameters(), 0.1)
        def step():
            losses(), optimizer.step()
        step = torch.compile(step, backend="eager")
        for batch in range(12):
            step()
            torch._dynamo.config.error_on_recompile = batch > 2
        """,
        None,
    ),
    "a forked process that trains, too": (
        """
        import os
        optimizer = optim.SGD(model.parameters(), 0.1)
        losses(), optimizer.step()
        if not (child := os.fork()):
            [optimizer.step() for _ in range(12)]
            os._exit(0)
        os.waitpid(child, 0)
        """,
        1,
    ),
}


@pytest.fixture
def cells(tmp_path: Path) -> Iterator[HeartbeatFile]:
    with closing(HeartbeatFile.create(tmp_path, SLOT + 1)) as made:
        yield made


def train(script: str, cells: HeartbeatFile) -> subprocess.CompletedProcess[str]:
    """Run a script in a worker with this heartbeat file."""
    variables = {**under_agent(cells), "ELASTIC_AGENT_PROGRESS": "nobody"}
    return run_script(BEGIN + textwrap.dedent(script), variables)


@pytest.mark.parametrize(("script", "steps"), CASES.values(), ids=CASES.keys())
def test_steps_are_counted_as_the_script_makes_them(
    script: str, steps: int | None, cells: HeartbeatFile
) -> None:
    done = train(script, cells)
    assert steps is None or cells.optimizer_steps(SLOT) == steps
    assert "compile" in script or done.stderr == ""
    assert cells.read(SLOT) == (0, 0), "nothing else was reported for the script"


CHILD = """
import os
optimizer = optim.SGD(model.parameters(), 0.1)
losses(), optimizer.step()
if not (child := os.fork()):
    from elastic_agent import client
    client.heartbeat(8), client.notice()
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_child_may_report_heartbeats_after_steps_of_a_worker_that_reports_none(
    cells: HeartbeatFile,
) -> None:
    train(CHILD, cells)
    assert (cells.read(SLOT), cells.optimizer_steps(SLOT)) == ((1, 8), 1)
    assert cells.handles_notices(SLOT)


def test_a_worker_without_its_file_trains_as_if_nothing_were_counted(tmp_path: Path) -> None:
    cells = HeartbeatFile.create(tmp_path, SLOT + 1)
    cells.close()
    done = train(CASES["SGD"][0], cells)
    assert (done.stdout, done.stderr) == ("", "")
