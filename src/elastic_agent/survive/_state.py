"""Implements :class:`elastic_agent.survive.State`."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from elastic_agent import client
from elastic_agent.survive._packing import check, map_tensors

_UNITS_S = {"ms": 0.001, "s": 1.0, "min": 60.0}


class State:
    """All that a training continues from: its parts, and the number of steps that are finished.

        state = survive.State(model=model, optimizer=optimizer, sampler=sampler)

    It is copied only at a *step boundary*: from when ``step`` is moved until an optimizer's next step begins.
    So move ``step`` last: after ``optimizer.step()``, ``scheduler.step()``, ``sampler.advance()``.
    """

    def __init__(self, *, memory: str | None = "5 s", **parts: Any) -> None:
        """Take the parts by name.

        Args:
            memory: the least time between two copies in memory ("5 s", "500 ms", "2 min"); None: no copies.
            parts: objects with ``state_dict`` and ``load_state_dict``.

        Raises:
            TypeError: a part lacks one of these methods.
            ValueError: ``memory`` is not a time, or a part is named "step".
        """
        for name, part in parts.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise TypeError(
                    f"survive.State: {name} is a {type(part).__name__}; expected an object with state_dict() and "
                    "load_state_dict()"
                )
        if "step" in parts:
            raise ValueError(
                "survive.State: a part is named step, which is the number of steps; give it another name"
            )
        self.parts = parts
        self.copy_every_s = None if memory is None else _seconds(memory)
        self.on_step: Callable[[], None] | None = None
        """Called when ``step`` has moved; set while a training function runs."""
        self._step = 0
        self._path: str | os.PathLike[str] | None = None
        """The place of the checkpoint."""
        self._checkpoint: Mapping[str, Any] | None = None

    @property
    def step(self) -> int:
        """The number of steps that are finished. The script moves it after each step."""
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        self._step = int(value)
        if self.on_step is not None:
            self.on_step()

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the state of each part, for a checkpoint."""
        return {"step": self._step, **{name: part.state_dict() for name, part in self.parts.items()}}

    def load(self, path: str | os.PathLike[str]) -> None:
        """Name the checkpoint to begin with; a file that does not exist is none.

        Only its step is read now. The rest is read when the training function starts, and only if no worker has a newer
        state in memory.

        Raises:
            ValueError: it is not what :meth:`save` wrote for the same parts.
        """
        self._path = path
        if not os.path.exists(path):
            return
        # With mmap, a tensor's data is read when it is used.
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        missing = [name for name in ("step", *self.parts) if name not in found]
        if missing:
            raise ValueError(
                f"State.load: {os.fspath(path)} has {', '.join(map(str, found))} and not {', '.join(missing)}; "
                "expected what State.save wrote for the same parts"
            )
        self._checkpoint = found
        self._step = int(found["step"])

    def load_newer(self) -> None:
        """Load the checkpoint again if it is newer than this state: others may have trained on without this worker."""
        step, checkpoint = self._step, self._checkpoint
        if self._path is not None:
            self.load(self._path)
        if self._step <= step:
            self._step, self._checkpoint = step, checkpoint

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint from rank 0, in one step for its readers; other ranks do nothing. Raises OSError."""
        if (dist.get_rank() if dist.is_initialized() else client.current().placement.rank) == 0:
            new = Path(f"{os.fspath(path)}.new")
            torch.save(self.state_dict(), new)
            new.replace(path)

    def restore_checkpoint(self) -> None:
        """Read what :meth:`load` named, if anything, into the parts."""
        if self._checkpoint is not None:
            self.restore(self._checkpoint)

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Take over a state in the form of :meth:`state_dict`, to the devices where the parts are; it is not kept."""
        for name, part in self.parts.items():
            if isinstance(part, nn.Module):
                part.load_state_dict(tree[name])
                continue
            # Others may keep the tensors that they load, and these may be views of memory that is written again.
            own = map_tensors(tree[name], torch.clone)
            part.load_state_dict(own)
            if isinstance(part, Optimizer):
                _restore_types(part, own)
        self._step = int(tree["step"])
        self._checkpoint = None

    def layout(self) -> bytes:
        """Return 32 bytes that differ where parts, or the shapes or types in models, differ.

        Raises:
            TypeError: the state of a part cannot be stored and read again; names the part.
        """
        facts: list[Any] = []
        for name, part in self.parts.items():
            saved = part.state_dict()
            check(name, saved)
            facts += [name, type(part).__qualname__]
            if isinstance(part, nn.Module):
                tensors = [(key, value) for key, value in saved.items() if isinstance(value, torch.Tensor)]
                facts += [(key, tuple(tensor.shape), str(tensor.dtype)) for key, tensor in tensors]
            elif isinstance(part, Optimizer):
                facts += [len(group["params"]) for group in part.param_groups]
        return hashlib.sha256(repr(facts).encode()).digest()


def _restore_types(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Give an optimizer's state the types that it was saved with: torch casts it to those of the parameters."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            loaded = optimizer.state[parameter][key]
            if isinstance(value, torch.Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(loaded.device)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(ms|s|min)", text)
    if match is None:
        raise ValueError(
            f'survive.State: memory={text!r}; expected a time such as "5 s", "500 ms" or "2 min", or None'
        )
    return float(match[1]) * _UNITS_S[match[2]]
