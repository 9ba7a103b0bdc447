"""A node that gives its workers memory as the agent does, and starts each of them as a new process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore

from elastic_agent import survive
from elastic_agent.agent.worker_group.factory import StateMemory
from elastic_agent.client._cells import HeartbeatFile
from tests.names import unique
from tests.waiting import GUARD_S

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["torch._dynamo", "elastic_agent.survive", "tests.survive.support"])


@dataclass(frozen=True)
class Ended:
    """A worker that has ended."""

    exitcode: int
    """Negative: the signal that it died of."""
    said: Any
    """What its function returned; None: it did not return."""
    errors: str
    """What it wrote to stderr."""


class Node:
    """One node: its memory outlives the workers, which :meth:`run` starts one generation after the other.

    As a context, it gives the memory back at the end.
    """

    def __init__(self, folder: Path, slots: int) -> None:
        self.memory = StateMemory(slots)
        self._folder = folder
        self._run_id = unique("run")
        self._generation = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.memory.close()

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        size: int = 1,
        first_slot: int = 0,
        memory: bool = True,
        restarts: int | None = None,
    ) -> list[Ended]:
        """Start the next generation, which calls the function in each of ``size`` processes; return how they ended."""
        self._generation += 1
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with contextlib.closing(HeartbeatFile.create(self._folder, first_slot + size)) as heartbeats:
            workers = []
            for rank in range(size):
                slot = first_slot + rank
                variables = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(size),
                    "LOCAL_WORLD_SIZE": str(size),
                    "GROUP_RANK": "0",
                    "GROUP_WORLD_SIZE": "1",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(store.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                    "ELASTIC_AGENT_RUN_ID": self._run_id,
                    "ELASTIC_AGENT_NODE_ID": "n",
                    "ELASTIC_AGENT_SLOT": str(slot),
                    "ELASTIC_AGENT_INCARNATION": "i",
                    "ELASTIC_AGENT_GENERATION": str(self._generation),
                    "ELASTIC_AGENT_RESTARTS": str(self._generation - 1 if restarts is None else restarts),
                    "ELASTIC_AGENT_FIRST_GENERATION": str(int(self._generation == 1)),
                    "ELASTIC_AGENT_HEARTBEAT": heartbeats.path,
                    **({"ELASTIC_AGENT_STATE_MEMORY": self.memory.paths[slot]} if memory else {}),
                }
                errors = self._folder / f"{self._generation}.{rank}"
                ours, theirs = _processes.Pipe()
                process = _processes.Process(
                    target=_work, args=(variables, errors, theirs, function, arguments)
                )
                process.start()
                theirs.close()
                workers.append((process, ours, errors))
            return [_end(*worker) for worker in workers]


def _end(process: Any, results: Any, errors: Path) -> Ended:
    said = None
    with contextlib.suppress(EOFError):
        said = results.recv()
    process.join(GUARD_S)
    assert process.exitcode is not None, errors.read_text()
    return Ended(process.exitcode, said, errors.read_text())


def _work(
    variables: dict[str, str],
    errors: Path,
    results: Any,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    try:
        results.send(function(*arguments))
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


# -- what they train --------------------------------------------------------------------------------


def build(width: int = 8, **more: Any) -> survive.State:
    """A model with running statistics and its optimizer, the same in every process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    return survive.State(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), **more)


def step(
    state: survive.State, model: nn.Module | None = None, *, fail: Callable[[], None] = lambda: None
) -> None:
    """Train a step on data that depends on its number only; ``fail`` is called between forward and backward."""
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(state.step))
    loss = (model or state.parts["model"])(inputs).square().mean()
    fail()
    loss.backward()
    state.parts["optimizer"].step()
    state.parts["optimizer"].zero_grad()
    state.step += 1


def values(state: survive.State) -> list[list[float]]:
    """All numbers of the state, to compare it bit by bit."""
    found: list[Tensor] = [*state.parts["model"].state_dict().values()]
    for moments in state.parts["optimizer"].state_dict()["state"].values():
        found += moments.values()
    return [tensor.double().flatten().tolist() for tensor in found]


def undisturbed(steps: int) -> list[list[float]]:
    """What a training has after so many steps that nothing interrupted."""
    torch.set_num_threads(1)  # as in the workers: sums depend on it
    state = build()
    while state.step < steps:
        step(state)
    return values(state)


def train_until(
    state: survive.State,
    steps: int,
    take_step: Callable[[survive.World, nn.Module], None] | None = None,
    *,
    with_ddp: bool = False,
) -> int:
    """Train until so many steps were taken, and return the first one; ``take_step`` is called instead of ``step``."""

    @survive.train(state)
    def train(world: survive.World) -> int:
        first = state.step
        model = world.ddp(state.parts["model"]) if with_ddp else state.parts["model"]
        while state.step < steps:
            take_step(world, model) if take_step is not None else step(state, model)
        return first

    return train()
