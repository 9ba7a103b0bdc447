"""Stores a tree of tensors in one piece of memory: the tensors side by side, then the rest as torch.save writes it.

The rest is the tree with meta tensors in place of its tensors: these have a shape and a type, and no data. It is read
with ``torch.load(weights_only=True)``, which runs no code of what it reads. Strides are kept: fused optimizers compute
with the memory of parameters and moments in the order in which it lies there.
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64
_SHARDED = ("DTensor", "ShardedTensor")


def map_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a copy of nested dicts, lists and tuples with each tensor changed, always in the same order."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        mapped = copy.copy(tree)  # of the same class, with its attributes: load_state_dict reads _metadata
        for key, value in tree.items():  # update() of a Counter would add
            mapped[key] = map_tensors(value, change)
        return mapped
    if type(tree) in (list, tuple):
        return type(tree)(map_tensors(value, change) for value in tree)
    return tree


@dataclass(frozen=True)
class Packed:
    """A tree that is ready to be stored."""

    tensors: list[Tensor]
    skeleton: bytes
    """The tree without the tensors' data."""

    @property
    def size(self) -> int:
        """The number of bytes it takes."""
        return sum(map(_room, self.tensors)) + len(self.skeleton)

    def write_to(self, memory: Tensor) -> None:
        """Store it in the bytes of ``memory``; waits for what a GPU still computes, in all of its streams."""
        for device in {tensor.device for tensor in self.tensors if tensor.device.type != "cpu"}:
            torch.accelerator.synchronize(device)
        start = 0
        for tensor in self.tensors:
            _view(memory, start, tensor).copy_(tensor)
            start += _room(tensor)
        memory[start:] = torch.frombuffer(bytearray(self.skeleton), dtype=torch.uint8)


def pack(tree: dict[str, Any]) -> Packed:
    """Prepare a tree to be stored; its tensors are not copied yet.

    Raises:
        TypeError: it contains tensors without data of their own on this rank.
    """
    tensors: list[Tensor] = []

    def hollow(tensor: Tensor) -> Tensor:
        kind = type(tensor).__name__
        is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not is_plain or tensor.is_meta or tensor.is_quantized:
            hint = ": a sharded model needs torch.distributed.checkpoint" if kind in _SHARDED else ""
            raise TypeError(
                f"a {kind} ({tensor.dtype}, {tensor.layout}, {tensor.device}); expected plain tensors with data{hint}"
            )
        tensors.append(tensor.detach())
        return _hollow(tensor)

    file = io.BytesIO()
    torch.save(map_tensors(tree, hollow), file)
    return Packed(tensors, file.getvalue())


def check(name: str, tree: Any) -> None:
    """Raise TypeError, with ``name``, if the tree cannot be stored and read again."""
    try:
        file = io.BytesIO(pack(tree).skeleton)
        torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:
        unknown = re.search(r"GLOBAL (\S+) was not", str(error))
        seen = unknown[1] if unknown else (str(error).splitlines() or [type(error).__name__])[0]
        more = (
            ""
            if isinstance(error, TypeError)
            else "; torch.load(weights_only=True) has to be able to read it"
        )
        raise TypeError(f"survive.State: the state of {name} contains {seen}{more}") from None


def unpack(memory: Tensor, skeleton_size: int, *, trusted: bool = False) -> dict[str, Any]:
    """Return the tree that fills ``memory``; its tensors are views of the memory.

    Args:
        memory: contains the packed tree and nothing else.
        skeleton_size: how many of its bytes, the last ones, are not those of tensors.
        trusted: read also objects whose classes run code when they are read.
    """
    file = io.BytesIO(memory[len(memory) - skeleton_size :].numpy().tobytes())
    start = 0

    def fill(tensor: Tensor) -> Tensor:
        nonlocal start
        if not tensor.is_meta:  # from an object that map_tensors does not look into
            return tensor
        start += _room(tensor)
        return _view(memory, start - _room(tensor), tensor)

    filled: dict[str, Any] = map_tensors(torch.load(file, weights_only=not trusted, map_location="cpu"), fill)
    return filled


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _view(memory: Tensor, start: int, tensor: Tensor) -> Tensor:
    hollow = _hollow(tensor)
    return memory[start : start + tensor.nbytes].view(tensor.dtype).as_strided(hollow.shape, hollow.stride())


def _hollow(tensor: Tensor) -> Tensor:
    """Return a meta tensor with the same strides, or without the gaps and overlaps of a view that has any."""
    return torch.empty_like(tensor, device="meta")
