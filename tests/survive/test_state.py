"""A state by itself: what it takes, and where what it restores goes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_agent import survive

from .support import build, step, values


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"memory": "5 h"}, ValueError, "memory='5 h'; expected a time such as \"5 s\""),
        ({"memory": "-1 s"}, ValueError, "expected a time"),
        ({"step": nn.Linear(1, 1)}, ValueError, "a part is named step"),
        ({"rate": 0.1}, TypeError, "rate is a float; expected an object with state_dict"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        survive.State(**arguments)
    assert text in str(caught.value)


@pytest.mark.parametrize(("text", "seconds"), [("5 s", 5.0), ("500ms", 0.5), ("1.5 min", 90.0)])
def test_times_have_units(text: str, seconds: float) -> None:
    assert survive.State(memory=text).copy_every_s == seconds


def test_a_checkpoint_is_restored_when_the_training_starts(tmp_path: Path) -> None:
    saved = build()
    step(saved)
    saved.save(tmp_path / "c.pt")
    fresh = build()
    before = values(fresh)
    fresh.load(tmp_path / "c.pt")
    assert (fresh.step, values(fresh)) == (1, before)

    @survive.train(fresh)
    def train(world: survive.World, factor: int, *, more: int) -> int:
        assert values(fresh) == values(saved)
        return world.world_size * factor + more

    assert train(10, more=2) == 12


def test_a_checkpoint_that_others_have_written_meanwhile_is_taken_if_it_is_newer(tmp_path: Path) -> None:
    """A worker that waits for its world, or is kept without one, may be the only one left."""
    others, path = build(), tmp_path / "checkpoint.pt"
    waiting = build()
    waiting.load(path)
    waiting.load_newer()
    assert waiting.step == 0
    for _ in range(3):
        step(others)
    others.save(path)
    waiting.load_newer()
    assert waiting.step == 3
    waiting.restore_checkpoint()
    assert values(waiting) == values(others)
    step(waiting)
    waiting.load_newer()
    assert waiting.step == 4


def test_a_checkpoint_of_other_parts_is_refused(tmp_path: Path) -> None:
    torch.save({"step": 1, "model": {}}, tmp_path / "c.pt")
    with pytest.raises(
        ValueError, match=r"c\.pt has step, model and not optimizer; expected what State\.save wrote"
    ):
        build().load(tmp_path / "c.pt")


class Momentum(torch.optim.Optimizer):
    """Keeps its state in float32, whatever the parameters are."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            moment = self.state[parameter].setdefault(
                "moment", torch.zeros_like(parameter, dtype=torch.float32)
            )
            moment.mul_(0.9).add_(parameter.grad.float())
            parameter -= 0.1 * moment.to(parameter.dtype)


def test_an_optimizer_keeps_the_precision_of_its_state() -> None:
    def state() -> survive.State:
        model = nn.Linear(4, 1).bfloat16()
        return survive.State(model=model, optimizer=Momentum(model.parameters()))

    first, second = state(), state()
    first.parts["model"](torch.ones(1, 4).bfloat16()).sum().backward()
    first.parts["optimizer"].step()
    saved = first.state_dict()
    second.restore(saved)
    for mine, its in zip(first.parts["model"].parameters(), second.parts["model"].parameters(), strict=True):
        restored = second.parts["optimizer"].state[its]["moment"]
        assert restored.dtype == torch.float32
        assert torch.equal(restored, first.parts["optimizer"].state[mine]["moment"])
        assert torch.equal(mine, its)
    # What was restored is the state's own: the memory that it came from is written again.
    for moments in saved["optimizer"]["state"].values():
        moments["moment"].fill_(7.0)
    moments = [moments["moment"] for moments in second.parts["optimizer"].state.values()]
    assert not any(torch.equal(moment, torch.full_like(moment, 7.0)) for moment in moments)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_state_goes_where_the_parameters_are(tmp_path: Path) -> None:
    saved = build()
    step(saved)
    saved.save(tmp_path / "c.pt")
    fresh = build()
    fresh.parts["model"].cuda()
    fresh.load(tmp_path / "c.pt")
    fresh.restore_checkpoint()
    assert values(fresh) == values(saved)
    for parameter, moments in fresh.parts["optimizer"].state.items():
        assert parameter.is_cuda
        assert moments["exp_avg"].is_cuda


def test_only_survive_imports_torch() -> None:
    program = "import sys; from elastic_agent import client; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
