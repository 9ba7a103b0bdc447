"""Decides when a state is copied to memory, and as what: only as it was at a step boundary."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastic_agent.survive._memory import Memory
from elastic_agent.survive._packing import map_tensors, pack
from elastic_agent.survive._state import State

_SMALL_BYTES = 1 << 20
"""Tensors that take less may be copied at every step."""


def say(text: str) -> None:
    """Write a line for the user to stderr."""
    print(f"elastic_agent.survive: {text}", file=sys.stderr, flush=True)


class Copies:
    """Copies a state while a training function runs."""

    def __init__(self, state: State, memory: Memory) -> None:
        self._state = state
        self._memory: Memory | None = memory
        self._every_s = state.copy_every_s or 0.0
        self._due_s = 0.0
        self._pid = os.getpid()
        self._at_boundary = True
        self._copied_step: int | None = None
        self._then: dict[str, Any] = {}
        self._optimizers = [part for part in state.parts.values() if isinstance(part, Optimizer)]
        self._hooks = [each.register_step_pre_hook(self._optimizer_steps) for each in self._optimizers]
        self._note_boundary()
        state.on_step = self._step_moved

    def close(self) -> None:
        """Copy no more."""
        self._state.on_step = None
        self._memory = None
        for hook in self._hooks:
            hook.remove()

    def keep(self) -> None:
        """Copy the state if it is at a step boundary and was not copied there."""
        with self._stopping_at(Exception):
            self._copy()

    def keep_after(self, error: BaseException) -> None:
        """Do the same when ``error`` has ended the training function; nothing that happens here takes its place."""
        with self._stopping_at(BaseException):
            groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
            on_gpu = any(tensor.device.type != "cpu" for group in groups for tensor in group["params"])
            # After a failed collective, the steps that were queued behind it on a GPU had wrong gradients.
            if not (on_gpu and isinstance(error, dist.DistError)):
                self._copy()

    def _optimizer_steps(self, *_: Any) -> None:
        self._at_boundary = False

    def _step_moved(self) -> None:
        if self._memory is None:
            return
        with self._stopping_at(Exception):
            self._note_boundary()
            self._at_boundary, self._copied_step = True, None
            if time.monotonic() >= self._due_s:
                self._copy()
                self._due_s = time.monotonic() + self._every_s
            # Without an optimizer, nothing says when the next step begins.
            self._at_boundary = bool(self._optimizers)

    @contextlib.contextmanager
    def _stopping_at(self, kind: type[BaseException]) -> Iterator[None]:
        """Say in a line what goes wrong, and copy no more: training must not fail for it."""
        try:
            yield
        except kind as problem:
            seen = (str(problem).splitlines() or [""])[0]
            say(f"no copies in memory from step {self._state.step} on: {seen or type(problem).__name__}")
            self._memory = None

    def _copy(self) -> None:
        if self._memory is None or os.getpid() != self._pid or not self._at_boundary:
            return
        if self._state.step != self._copied_step:
            self._memory.write(self._state.step, pack(self._tree()))
            self._copied_step = self._state.step

    def _note_boundary(self) -> None:
        """Note what moves before the next optimizer step: samplers by data loaders, buffers by the forward."""
        for name, part in self._state.parts.items():
            if isinstance(part, nn.Module):
                moving: dict[str, Any] = dict(part.named_buffers())
            elif isinstance(part, (Optimizer, LRScheduler, GradScaler)):
                continue
            else:
                moving = part.state_dict()
            self._then[name] = copy.deepcopy(map_tensors(moving, _detached_copy)) if _is_small(moving) else {}

    def _tree(self) -> dict[str, Any]:
        """Return the state as it was at the step boundary."""
        tree = self._state.state_dict()
        for name, then in self._then.items():
            if isinstance(self._state.parts[name], nn.Module):
                tree[name].update((key, then[key]) for key in then.keys() & tree[name].keys())
            elif then:
                tree[name] = then
        return tree


def _detached_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _is_small(tree: Any) -> bool:
    sizes: list[int] = []
    map_tensors(tree, lambda tensor: sizes.append(tensor.nbytes))
    return sum(sizes) <= _SMALL_BYTES
