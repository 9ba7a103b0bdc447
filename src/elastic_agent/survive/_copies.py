"""Decides when a state is copied to memory, and as what: only as it was at a step boundary."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from elastic_agent.survive._memory import Memory
from elastic_agent.survive._packing import map_tensors, pack
from elastic_agent.survive._state import State
from elastic_agent.survive._survivor import Survivor, has_used_gpu

_SMALL_BYTES = 1 << 20
"""Tensors of a part that take no more are copied at every step."""


def say(text: str) -> None:
    """Write a line for the user to stderr, at once, as others may write there too."""
    print(f"elastic_agent.survive: {text}\n", end="", file=sys.stderr, flush=True)


class Copies:
    """Copies a state while a training function runs."""

    def __init__(self, state: State, memory: Memory, survivor: Survivor | None = None) -> None:
        """Begin. ``survivor``: leaves its world, if it is to, before a step changes anything."""
        self._survivor = survivor
        self._state = state
        self._memory: Memory | None = memory
        self._every_s = state.copy_every_s or 0.0
        self._due_s = 0.0
        self._pid = os.getpid()
        self._at_boundary = True
        self._copied_step: int | None = None
        self._then: dict[str, Any] = {}
        self._optimizers = [part for part in state.parts.values() if isinstance(part, Optimizer)]
        self._hooks: list[RemovableHandle] = []
        self._buffers: dict[str, list[_Buffer]] = {}
        state.on_step = self._step_moved
        with self._stopping_at(Exception):
            for optimizer in self._optimizers:
                self._hooks.append(optimizer.register_step_pre_hook(self._optimizer_steps))
            for name, part in state.parts.items():
                if isinstance(part, nn.Module):
                    self._buffers[name] = _small_buffers(part)
            self._note_boundary()

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

    @property
    def is_at_boundary(self) -> bool:
        """Whether no step has changed the parameters since the last step boundary, which is known."""
        return self._at_boundary and self._memory is not None and os.getpid() == self._pid

    def rewind(self) -> None:
        """Undo what has moved since the last step boundary, and drop the gradients of the step that was begun.

        Raises:
            RuntimeError: a part is too large for that.
        """
        for name, part in self._state.parts.items():
            if not self._then.get(name) and _moves_between_steps(part):
                raise RuntimeError(f"{name} is too large to be set back to the last step boundary")
        with torch.no_grad():
            for name, then in self._then.items():
                part = self._state.parts[name]
                if isinstance(part, nn.Module):
                    for key, buffer in part.named_buffers():
                        if key in then:
                            buffer.copy_(then[key])
                elif then:
                    part.load_state_dict(then)
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def keep_at_sigterm(self) -> None:
        """Do the same, but not from GPUs: they may wait for a collective whose other ranks have ended."""
        if not self._is_on_gpu():
            self.keep()

    def keep_after(self, error: BaseException) -> None:
        """Do as :meth:`keep` when ``error`` has ended the training function; nothing raised here takes its place."""
        with self._stopping_at(BaseException):
            # After a failed collective, the steps that were queued behind it on a GPU had wrong gradients.
            if not (isinstance(error, dist.DistError) and self._is_on_gpu()):
                self._copy()

    def leave_if_aborted(self) -> None:
        """Leave the world if it is to be left, and so NCCL's results since the last step boundary may be wrong."""
        if self._survivor is not None and has_used_gpu():
            self._survivor.leave_if_told()

    def _is_on_gpu(self) -> bool:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return any(tensor.device.type != "cpu" for group in groups for tensor in group["params"])

    def _optimizer_steps(self, *_: Any) -> None:
        if self._at_boundary and self._survivor is not None:
            self._survivor.leave_if_told()
        self.leave_if_aborted()  # also where a step has several optimizers
        self._at_boundary = False

    def _step_moved(self) -> None:
        if self._memory is None:
            return
        if self._survivor is not None and has_used_gpu():
            # The gradients may have come after the optimizer began, and a script may skip the step because of them.
            self._at_boundary = False
            self._survivor.leave_if_told()
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
        if self._survivor is not None and has_used_gpu() and self._survivor.is_told_to_leave:
            return  # buffers that are too large to be set back may be wrong
        if self._state.step != self._copied_step:
            self._memory.write(self._state.step, pack(self._tree()))
            self._copied_step = self._state.step

    def _note_boundary(self) -> None:
        """Note what moves before the next optimizer step.

        Buffers move by the forward, samplers by data loaders, and a gradient scaler when it skips an optimizer's step.
        """
        for name, part in self._state.parts.items():
            if isinstance(part, nn.Module):
                # By name: a module may assign another tensor to a buffer.
                tensors = ((each.key, getattr(each.module, each.name, None)) for each in self._buffers[name])
                self._then[name] = {
                    key: _detached_copy(tensor) for key, tensor in tensors if tensor is not None
                }
            elif not isinstance(part, Optimizer):
                moving = part.state_dict()
                self._then[name] = _copy_of(moving) if _is_small(moving) else {}

    def _tree(self) -> dict[str, Any]:
        """Return the state as it was at the step boundary."""
        tree = self._state.state_dict()
        for name, then in self._then.items():
            if isinstance(self._state.parts[name], nn.Module):
                tree[name].update((key, then[key]) for key in then.keys() & tree[name].keys())
            elif then:
                tree[name] = then
        return tree


class _Buffer(NamedTuple):
    """Where a buffer of a model is."""

    key: str
    """In the model's state_dict."""
    module: nn.Module
    name: str
    """In ``module``."""


def _small_buffers(model: nn.Module) -> list[_Buffer]:
    """Return the buffers that the model saves, under each of their names; none if they take too much memory."""
    saved = model.state_dict()
    buffers = {key: tensor for key, tensor in model.named_buffers(remove_duplicate=False) if key in saved}
    if not _is_small(buffers):
        return []
    places = ((key, *key.rpartition(".")[::2]) for key in buffers)
    return [_Buffer(key, model.get_submodule(path), name) for key, path, name in places]


def _moves_between_steps(part: Any) -> bool:
    """Return whether something of a part may move without an optimizer's step."""
    if isinstance(part, nn.Module):
        saved = part.state_dict()
        return any(key in saved for key, _ in part.named_buffers())
    return not isinstance(part, Optimizer) and bool(part.state_dict())


def _copy_of(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of all that is in the tree; copy.deepcopy alone refuses tensors that have a gradient function."""
    tensors: dict[int, Tensor] = {}
    map_tensors(tree, lambda tensor: tensors.setdefault(id(tensor), _detached_copy(tensor)))
    return copy.deepcopy(tree, tensors)


def _detached_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _is_small(tree: Any) -> bool:
    sizes: list[int] = []
    map_tensors(tree, lambda tensor: sizes.append(tensor.nbytes))
    return sum(sizes) <= _SMALL_BYTES
