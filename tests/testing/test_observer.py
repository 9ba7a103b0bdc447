"""The steps of a script are counted as its author would, whatever its optimizers are made of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elastic_agent.testing.course import Course
from elastic_agent.testing.processes import Lines
from tests.client.support import AGENT_ENVIRONMENT, launched

TRAINING = """
import pathlib, torch

class Decayed(torch.optim.SGD):
    # Also changes the parameters after the step of its parent.
    def step(self, closure=None):
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.9)
        return result

class Wrapping(torch.optim.Optimizer):
    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner
    def step(self, closure=None):
        return self.inner.step(closure)

class Failing(Decayed):
    def step(self, closure=None):
        if not hasattr(self, "failed"):
            self.failed = True
            raise MemoryError
        return super().step(closure)

model = torch.nn.Linear(4, 2)
parameters = list(model.parameters())
torch.optim.SGD(parameters, 0.1)  # from now on torch calls the hooks for super().step(), too
optimizers = OPTIMIZERS
file = pathlib.Path(__file__).with_name("checkpoint.pt")
if file.exists():
    model.load_state_dict(torch.load(file))
if any(isinstance(optimizer, Failing) for optimizer in optimizers):
    try:
        optimizers[0].step()
    except MemoryError:
        pass
for _ in range(3):
    model.zero_grad()
    model(torch.ones(4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
torch.save(model.state_dict(), file)
"""

OBSERVER = """
import os
import torch._dynamo  # what the first optimizer of each process would import, which takes it seconds
from elastic_agent.testing import observer

for generation in ("1", "2"):
    child = os.fork()
    if child == 0:
        os.environ["ELASTIC_AGENT_GENERATION"] = generation
        observer.main()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
os._exit(0)
"""


@pytest.mark.parametrize(
    "optimizers",
    [
        pytest.param("[torch.optim.SGD(parameters, 0.1)]", marks=pytest.mark.prove),
        "[Decayed(parameters, 0.1)]",
        pytest.param("[Wrapping(Decayed(parameters, 0.1))]", marks=pytest.mark.prove),
        pytest.param(
            "[torch.optim.SGD([parameter], 0.1) for parameter in parameters[::-1]]", marks=pytest.mark.prove
        ),
        pytest.param("[Failing(parameters, 0.1)]", marks=pytest.mark.prove),
    ],
    ids=["plain", "subclass", "wrapping", "one for each parameter", "raises once"],
)
def test_a_step_counts_once_and_training_goes_on_after_it(tmp_path: Path, optimizers: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING.replace("OPTIMIZERS", optimizers))
    command = [sys.executable, "-c", OBSERVER, str(tmp_path), str(script)]
    subprocess.run(command, env=launched(AGENT_ENVIRONMENT), check=True)
    course = Course()
    for line in Lines(tmp_path / "records.jsonl", strict=True).all():
        course.feed(line)
    first, second = course.generations[1], course.generations[2]
    assert (first.start, first.reached, first.steps.total()) == (0, 3, 3)
    assert (second.start, second.reached, second.lost) == (3, 6, 0)
