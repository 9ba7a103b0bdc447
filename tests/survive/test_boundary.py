"""What is kept is the state at the end of a step, bit by bit, whatever models and optimizers do in the next one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from elastic_agent import survive
from elastic_agent.data import ElasticBatchSampler, ElasticSampler

from .support import Node, build, step, train_until, values


class SharedNorm(nn.Module):
    """Has the same BatchNorm under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.BatchNorm2d(8)
        self.convolution = nn.Conv2d(8, 8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.convolution(inputs))  # type: ignore[no-any-return]


class Mean(nn.Module):
    """Assigns a new tensor to its buffer in each forward, and has a mask that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("mask", torch.ones(1024, 1024), persistent=False)
        self.convolution = nn.Conv2d(8, 8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.convolution(inputs)
        self.mean = 0.9 * self.mean + 0.1 * outputs.detach().mean(dim=(0, 2, 3))
        return outputs - self.mean[:, None, None]


MODELS = {
    "two names": SharedNorm,
    "assigned buffer, large mask": Mean,
    "channels last, fused": lambda: nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last),
}


def train_convolution(kind: str, steps: int, fail_at: int | None) -> Any:
    torch.manual_seed(0)
    model = MODELS[kind]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused="fused" in kind)
    state = survive.State(model=model, optimizer=optimizer)

    def take_step(*_: Any) -> None:
        inputs = torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(state.step))
        loss = model(inputs).square().mean()
        if state.step == fail_at:
            raise RuntimeError("out of memory")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1

    return train_until(state, steps, take_step), values(state)


@pytest.mark.parametrize("kind", MODELS)
def test_a_failure_after_the_forward_leaves_no_trace(alone: Node, kind: str) -> None:
    _, undisturbed = alone.run(train_convolution, kind, 6, None, memory=False)[0].said
    assert alone.run(train_convolution, kind, 6, 3)[0].exitcode == 1
    assert alone.run(train_convolution, kind, 6, None)[0].said == (3, undisturbed)


def train_scaled(fail: bool) -> list[float]:
    """Train with losses that overflow in step 2; returns the scale before each step."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    state = survive.State(model=model, optimizer=optimizer, scaler=scaler)
    scales = []

    def take_step(*_: Any) -> None:
        scales.append(scaler.get_scale())
        loss = model(torch.ones(1, 2)).sum() * (float("inf") if state.step == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # skips the optimizer's step
        scaler.update()
        optimizer.zero_grad()
        if fail and state.step == 2:
            raise RuntimeError("out of memory")
        state.step += 1

    train_until(state, 4, take_step)
    return scales


def test_a_skipped_step_that_failed_scales_once(alone: Node) -> None:
    assert alone.run(train_scaled, True)[0].exitcode == 1
    assert alone.run(train_scaled, False)[0].said == [65536.0, 32768.0]


def train_with_default_device(steps: int) -> int:
    torch.set_default_device("meta")
    with torch.device("cpu"):
        model = nn.Linear(2, 1)
    state = survive.State(model=model)

    @survive.train(state)
    def train(world: survive.World) -> int:
        first, state.step = state.step, steps
        return first

    return train()


def test_a_default_device_changes_nothing(two: Node) -> None:
    assert two.run(train_with_default_device, 3, size=1)[0].said == 0
    workers = two.run(train_with_default_device, 5, size=2)
    assert [worker.said for worker in workers] == [3, 3], workers


@pytest.mark.parametrize(
    ("local_rank", "gpus", "device"), [(0, 0, "cpu"), (1, 1, "cpu"), (1, 2, "cuda:1"), (0, 1, "cuda:0")]
)
def test_a_worker_has_the_gpu_of_its_local_rank(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, gpus: int, device: str
) -> None:
    """The last row is that of each worker with --virtual-local-rank, which sees one GPU of several."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, str(local_rank))
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("GROUP_RANK", "0")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert str(survive.World("training").device) == device


# -- samplers ---------------------------------------------------------------------------------------


def use_samples(folder: Path, kind: str, fail_at: int | None) -> list[int]:
    """Write down the samples of every finished step, which loaders fetch well ahead."""
    dataset = list(range(48))
    sampler: Any
    sampler = (
        ElasticBatchSampler(dataset, global_batch_size=4) if kind == "batches" else ElasticSampler(dataset)
    )
    state = build(sampler=sampler)
    chosen = {"batch_sampler": sampler} if kind == "batches" else {"sampler": sampler, "batch_size": 4}
    used: list[int] = []

    @survive.train(state)
    def train(world: survive.World) -> None:
        options = {"num_workers": 1, "prefetch_factor": 8, "multiprocessing_context": "fork"}
        loader = DataLoader(dataset, **options, **chosen)  # type: ignore[arg-type]
        for epoch in range(sampler.epoch, 2):
            sampler.set_epoch(epoch)
            for batch in loader:
                if state.step == fail_at:
                    (folder / "used").write_text(" ".join(map(str, used)))
                    raise RuntimeError("out of memory")
                loss = state.parts["model"](torch.randn(16, 4)).mean()
                loss.backward()
                state.parts["optimizer"].step()
                sampler.advance() if kind == "batches" else sampler.advance(len(batch))
                used.extend(batch.tolist())
                state.step += 1

    train()
    return used


@pytest.mark.parametrize("kind", ["batches", "samples"])
@pytest.mark.parametrize("fail_at", [5, 12, 17])
def test_samples_that_were_fetched_and_not_used_are_used_after_the_restart(
    alone: Node, tmp_path: Path, kind: str, fail_at: int
) -> None:
    assert alone.run(use_samples, tmp_path, kind, fail_at)[0].exitcode == 1
    before = [int(number) for number in (tmp_path / "used").read_text().split()]
    [again] = alone.run(use_samples, tmp_path, kind, None)
    both = before + again.said
    assert sorted(both[:48]) == sorted(both[48:]) == list(range(48))


class CountsAtFetch:
    """A sampler that counts the samples it has given away, and not those that were used."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < 48:
            self.position += 1
            yield self.position - 1

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def use_counted_samples(fail_at: int | None) -> list[int]:
    sampler = CountsAtFetch()
    state = build(sampler=sampler)
    used: list[int] = []

    @survive.train(state)
    def train(world: survive.World) -> None:
        for batch in DataLoader(list(range(48)), sampler=sampler, batch_size=4):  # type: ignore[arg-type]
            if state.step == fail_at:
                raise RuntimeError("out of memory")
            step(state)
            used.extend(batch.tolist())

    train()
    return used


def test_a_sampler_is_kept_as_it_was_when_the_last_step_ended(alone: Node) -> None:
    assert alone.run(use_counted_samples, 5)[0].exitcode == 1
    assert alone.run(use_counted_samples, None)[0].said == list(range(20, 48))
