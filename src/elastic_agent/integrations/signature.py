"""Describes what a training depends on, so that no training is continued from a checkpoint of another one.

A signature is a flat dictionary of JSON values: settings, hyperparameters, the shapes of the parameters, the data. A
process describes its training before the first step; the next process of the run describes its own, and continues from
the checkpoints only if nothing differs. Describing reads attributes only: it calls no code of the script, draws no
random numbers and loads no samples.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import itertools
import math
import os
import time
import zlib
from collections.abc import Iterable, Mapping, Set
from typing import Any

Signature = dict[str, Any]
"""By name, a JSON scalar, or a short text that stands for more."""

_STRICT = ("seed", "length")
"""Last parts of names of numbers that no script computes from the number of workers."""

_OF_THE_MACHINE = {
    *("num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "device", "devices", "gpus"),
    *("nodes", "num_nodes", "node_rank", "rank", "local_rank", "world_size", "local_world_size"),
}
"""Last parts of names of what may differ between machines and worlds."""

_SAMPLE = 4096
"""Elements that are compared of many numbers of samples, evenly spaced."""
_LISTED = 32
"""Items up to which a sequence is described item by item, so that a difference has a name."""
_NAMED = 512
"""The same of a mapping."""
_DEPTH = 4
_TEXT = 200
_CLOCK_S = 30 * 86400.0
"""A float this close to the present time is a time of the clock, which differs in each process."""


def of_seed() -> Signature:
    """Describe with which number torch was seeded last, by the script or by the framework; nothing if by neither.

    A process begins with a seed of 64 bits that torch draws from the system. Those that people choose have 32.
    """
    import torch

    seed = torch.initial_seed()
    return {"seed": seed if seed < 2**32 else None}


def of_values(name: str, values: Any) -> Signature:
    """Describe settings, hyperparameters or any other data under the given name."""
    found: Signature = {}
    _describe(found, name, values, _DEPTH)
    return found


def of_model(model: Any) -> Signature:
    """Describe a ``torch.nn.Module``: its class, its own attributes, its parameters, and the settings of its layers."""
    from torch.nn.parameter import is_lazy

    shapes = [
        f"{name}{[] if is_lazy(tensor) else [*tensor.shape]}{tensor.dtype}{tensor.requires_grad}"
        for name, tensor in model.named_parameters()
    ]
    layers = [
        f"{name}.{key}={value!r}"
        for name, layer in model.named_modules()
        if layer is not model
        for key, value in of_attributes("", layer).items()
    ]
    return {
        "model": _name_of(type(model)),
        "model.parameters": f"{len(shapes)} tensors, {_checksum(shapes)}",
        "model.layers": f"{len(layers)} settings, {_checksum(layers)}",
        **of_attributes("model", model),
    }


def of_attributes(name: str, owner: Any) -> Signature:
    """Describe the attributes of an object that are data. Private ones, and objects in them, are left out."""
    found: Signature = {}
    for attribute, value in getattr(owner, "__dict__", {}).items():
        if not attribute.startswith("_") and attribute != "training":
            _describe(found, f"{name}.{attribute}", value, _DEPTH, objects=False)
    return found


def of_data(name: str, data: Any) -> Signature:
    """Describe training data: a ``Dataset``, a ``DataLoader``, a ``LightningDataModule``, or a collection of them."""
    from torch.utils.data import DataLoader

    if isinstance(data, Mapping):
        return _merged(of_data(f"{name}.{key}", value) for key, value in data.items())
    if isinstance(data, list | tuple):
        return _merged(of_data(f"{name}.{index}", value) for index, value in enumerate(data))
    if isinstance(data, DataLoader):
        chosen = _selection(f"{name}.sampler.indices", getattr(data.sampler, "indices", None))
        return {f"{name}.batch_size": data.batch_size, **chosen, **of_data(name, data.dataset)}
    found = {name: _name_of(type(data)), **of_length(name, data), **of_attributes(name, data)}
    attributes = getattr(data, "__dict__", {})
    # The package `datasets` keeps a table of the rows that were selected.
    for attribute, selected in (("indices", attributes.get("indices")), ("rows", attributes.get("_indices"))):
        if selected is not None:
            found = {key: value for key, value in found.items() if not key.startswith(f"{name}.{attribute}")}
            found.update(_selection(f"{name}.{attribute}", selected))
    for attribute, value in attributes.items():
        if _is_dataset(value) and name.count(".") < _DEPTH:
            found.update(of_data(f"{name}.{attribute}", value))
    return found


def _selection(name: str, selected: Any) -> Signature:
    """Describe the numbers of the samples that are used: in ascending order, as those of folds are, by their values.

    Others are drawn at random, by scripts that seed nothing in each process anew: only their number is described.
    """
    if hasattr(selected, "column"):
        selected = selected.column(0)
    try:
        count = len(selected)
        some = selected[:: max(1, count // _SAMPLE)]
        numbers = [int(number) for number in (some.to_pylist() if hasattr(some, "to_pylist") else some)]
    except Exception:  # it is something else
        return {}
    in_order = all(before < after for before, after in itertools.pairwise(numbers))
    return {name: f"{count} items, {_checksum(numbers)}" if in_order else f"{count} items"}


def of_length(name: str, data: Any) -> Signature:
    """Describe how many samples a ``Dataset`` has; nothing if it has no length."""
    try:
        return {f"{name}.length": len(data)} if _is_dataset(data) else {}
    except Exception:  # the script's own code: nothing is known then
        return {}


def _is_dataset(value: Any) -> bool:
    from torch.utils.data import Dataset

    return isinstance(value, Dataset) or type(value).__module__ == "datasets.arrow_dataset"


def of_optimizers(optimizers: Iterable[Any]) -> Signature:
    """Describe optimizers, before they have taken a step: their classes, learning rates and other settings."""
    found: Signature = {}
    for index, optimizer in enumerate(optimizers):
        found[f"optimizer.{index}"] = _name_of(type(optimizer))
        for number, group in enumerate(optimizer.param_groups):
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            _describe(found, f"optimizer.{index}.{number}", settings, _DEPTH, objects=False)
    return found


def difference(earlier: Signature, now: Signature, ratio: float) -> str:
    """Return the first fact in which the signatures differ, as ``NAME is VALUE and was VALUE``; empty if none does.

    Args:
        earlier: of an earlier process.
        now: of this process.
        ratio: of the numbers of workers, now to then. If it is not 1, numbers may be scaled as scripts scale batches
            and learning rates.
    """
    missing = "not set"
    for name in {**now, **earlier}:
        values = earlier.get(name, missing), now.get(name, missing)
        if not _same(name, *values, ratio):
            was, present = (missing if value is None else value for value in values)
            return f"{name} is {present} and was {was}"
    return ""


def _same(name: str, earlier: Any, now: Any, ratio: float) -> bool:
    if earlier == now:
        return True
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (earlier, now))
    if ratio == 1 or not numbers or name.endswith(_STRICT):
        return False
    if isinstance(earlier, int) and isinstance(now, int):
        return any(abs(earlier * ratio**power - now) < 1 for power in (1, -1))  # rounded
    return any(math.isclose(earlier * ratio**power, now, rel_tol=1e-6) for power in (1, -1, 0.5, -0.5))


def _describe(found: Signature, name: str, value: Any, depth: int, *, objects: bool = True) -> None:
    """Add what is known of a value. ``objects``: add the classes of those that are no data, too."""
    if name.rpartition(".")[2] in _OF_THE_MACHINE:
        return
    parts = _parts(value) if depth > 0 else None
    if parts is not None and len(parts) <= (_LISTED if isinstance(value, list | tuple) else _NAMED):
        for key, part in parts.items():
            _describe(found, f"{name}.{key}", part, depth - 1, objects=objects)
        return
    text = _text(value)
    if text is not NotImplemented:
        found[name] = text
    elif objects:
        found[name] = _name_of(type(value))


def _parts(value: Any) -> dict[str, Any] | None:
    """Return the parts of a collection by name; None if the value is none."""
    if isinstance(value, argparse.Namespace) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    ):
        return dict(getattr(value, "__dict__", {}))
    if isinstance(value, Mapping):
        return {str(key): part for key, part in value.items()}
    if isinstance(value, list | tuple):
        return {str(index): part for index, part in enumerate(value[: _LISTED + 1])}
    return None


def _text(value: Any) -> Any:
    """Return a JSON value that stands for this one; NotImplemented if it is an object."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return repr(value)  # JSON has none, and none equals itself
        return "a time" if abs(value - time.time()) < _CLOCK_S else float(value)
    if isinstance(value, str | bytes | os.PathLike):
        path = os.fspath(value)
        return path if isinstance(path, str) and len(path) <= _TEXT else _checksum([path])
    if isinstance(value, Set | Mapping | list | tuple | range):
        return f"{len(value)} items"
    return _tensor(value)


def _tensor(value: Any) -> Any:
    """Describe a tensor or an array by its shape: its values may be random. NotImplemented if it is neither."""
    shape, kind = getattr(value, "shape", None), getattr(value, "dtype", None)
    if kind is None or not isinstance(shape, tuple) or not hasattr(value, "item"):
        return NotImplemented
    is_number = len(shape) == 0 and not getattr(value, "is_meta", False)
    return _text(value.item()) if is_number else f"{kind}{[*shape]}"


def _checksum(parts: Iterable[Any]) -> str:
    """Return a short text for parts of which the values matter, or the classes if they are objects."""
    total = 0
    for part in parts:
        known = part if isinstance(part, str | bytes | int | float | None) else _name_of(type(part))
        total = zlib.crc32(repr(known).encode(errors="backslashreplace"), total)
    return f"checksum {total:08x}"


def _merged(signatures: Iterable[Signature]) -> Signature:
    return {name: value for signature in signatures for name, value in signature.items()}


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
