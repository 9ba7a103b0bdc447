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
import re
import sys
import time
import zlib
from collections import UserDict
from collections.abc import Callable, Iterable
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

Signature = dict[str, Any]
"""By name, a JSON scalar, or a short text that stands for more."""

_STRICT = ("seed", "fold", "split", "task")
"""Last parts of names of numbers that no script computes from the number of workers."""
_SELECTED = ("indices", "rows")
"""Last parts of names of the samples that are used, which a script may divide among the workers."""
_OF_THE_MACHINE = re.compile(
    r"(\w+_)?(workers|gpus?|cpus|threads|processes|ranks?|world_size|nodes?|devices?|device_map|accelerator|strategy"
    r"|distributed|dist_url|pin_memory|prefetch_factor|persistent_workers|hosts?|hostname|ports?|pid)"
)
"""Last parts of names of what may differ between machines and worlds."""
_OF_THE_START = re.compile(
    r"(log|save|out|output|run|ckpt|checkpoint|tmp|temp|cache|work|default_root)_?(dir|path|root|folder)"
    r"|(run|exp|experiment|job)_?(name|id)|version|timestamp|start_?time|date"
)
"""Last parts of names of what scripts choose anew whenever they are started."""
_DATE = re.compile(r"\d{4}[-_.]?\d\d[-_.]?\d\d")

_SAMPLE = 4096
"""Elements that are compared of many numbers of samples, evenly spaced."""
_LISTED = 32
"""Items up to which a sequence is described item by item, so that a difference has a name."""
_NAMED = 512
"""The same of a mapping."""
_DEPTH = 4
_TEXT = 200
_CLOCK_S = 30 * 86400.0
"""A number this close to the present time is a time of the clock, which differs in each process."""
_TOLERANCE = 0.05
"""By which numbers may differ from scaled ones: scripts round them, once or several times."""


def described(describe: Callable[[Any], Signature], training: Any) -> Signature:
    """Return what the function describes. If it fails, the training is like no other, so that it is not continued."""
    try:
        return describe(training)
    except Exception as error:  # of the script's objects
        return {"description": f"{type(error).__name__} {os.urandom(4).hex()}"}


def described_late(describe: Callable[[Any], Signature], training: Any) -> Signature:
    """Return what the function describes; nothing if it fails: training has begun."""
    try:
        return describe(training)
    except Exception:  # of the script's objects
        return {}


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


def of_sharded_model(model: Any) -> Signature:
    """Describe a model that is divided among the workers already: its parameters are those of this worker."""
    return {"model": _name_of(type(model)), **of_attributes("model", model)}


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

    if isinstance(data, dict | list | tuple):
        parts = data.items() if isinstance(data, dict) else enumerate(data)
        if len(data) > _LISTED or not all(_is_data(part) for _, part in parts):
            return {name: _name_of(type(data)), f"{name}.length": len(data)}
        parts = data.items() if isinstance(data, dict) else enumerate(data)
        described_parts = [of_data(f"{name}.{key}", part) for key, part in parts]
        return {fact: value for found in described_parts for fact, value in found.items()}
    if isinstance(data, DataLoader):
        chosen = _selection(f"{name}.sampler.indices", getattr(data.sampler, "indices", None))
        return {**of_values(f"{name}.batch_size", data.batch_size), **chosen, **of_data(name, data.dataset)}
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
    try:
        if hasattr(selected, "column"):
            selected = selected.column(0)
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


def _is_data(value: Any) -> bool:
    from torch.utils.data import DataLoader

    return isinstance(value, DataLoader | dict | list | tuple) or _is_dataset(value)


def _is_dataset(value: Any) -> bool:
    from torch.utils.data import Dataset

    return isinstance(value, Dataset) or type(value).__module__ == "datasets.arrow_dataset"


def of_optimizers(optimizers: Iterable[Any]) -> Signature:
    """Describe optimizers, before they have taken a step: their classes, learning rates and other settings."""
    found: Signature = {}
    for index, optimizer in enumerate(optimizers):
        found[f"optimizer.{index}"] = _name_of(type(optimizer))
        for number, group in enumerate(optimizer.param_groups):
            # Of a schedule, the first rate counts.
            left_out = {"params", "param_names", *(["lr"] if "initial_lr" in group else [])}
            settings = {key: value for key, value in group.items() if key not in left_out}
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
    last = name.rpartition(".")[2]
    if earlier == now or (ratio != 1 and last in _SELECTED):
        return True
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (earlier, now))
    if ratio == 1 or not numbers or last in _STRICT:
        return False
    scaled = [earlier * ratio**power for power in (1, 0, -1)]
    if isinstance(earlier, int) and isinstance(now, int):
        if any(now in (math.floor(number), round(number)) for number in scaled):
            return True
    else:
        scaled += [earlier * ratio**power for power in (0.5, -0.5)]
    return any(math.isclose(number, now, rel_tol=_TOLERANCE) for number in scaled)


def _describe(found: Signature, name: str, value: Any, depth: int, *, objects: bool = True) -> None:
    """Add what is known of a value. ``objects``: add the classes of those that are no data, too."""
    last = name.rpartition(".")[2].lower()
    if _OF_THE_MACHINE.fullmatch(last) or _OF_THE_START.fullmatch(last):
        return
    try:
        parts = _parts(value) if depth > 0 else None
        text = _text(value) if parts is None else None
    except Exception:  # the value's own code
        parts, text = None, "not known"
    if parts is not None:
        for key, part in parts.items():
            _describe(found, f"{name}.{key}", part, depth - 1, objects=objects)
    elif text is not NotImplemented:
        found[name] = text
    elif objects:
        found[name] = _name_of(type(value))


def _parts(value: Any) -> dict[str, Any] | None:
    """Return the parts of a small collection by name; None if the value is none, or has too many."""
    if type(value).__module__.startswith("omegaconf."):
        # Without what its resolvers, the script's code, compute.
        value = sys.modules["omegaconf"].OmegaConf.to_container(value, resolve=False)
    if isinstance(value, argparse.Namespace) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    ):
        value = dict(getattr(value, "__dict__", {}))
    if isinstance(value, dict | MappingProxyType | UserDict) and len(value) <= _NAMED:
        return {str(key): part for key, part in value.items()}
    if isinstance(value, list | tuple) and len(value) <= _LISTED:
        return {str(index): part for index, part in enumerate(value)}
    return None


def _text(value: Any) -> Any:
    """Return a JSON value that stands for this one; NotImplemented if it is an object."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, int | float):
        return _number(value)
    if isinstance(value, PurePath):
        value = str(value)
    if isinstance(value, str):
        text = os.path.basename(value) if os.path.isabs(value) else value
        if _DATE.search(text):
            return "a time"
        return text if len(text) <= _TEXT else _checksum([text])
    if isinstance(value, bytes):
        return _checksum([value])
    if isinstance(value, set | frozenset | dict | list | tuple | range):
        return f"{len(value)} items"
    return _tensor(value)


def _number(value: float) -> Any:
    if not math.isfinite(value):
        return repr(value)  # JSON has none, and none equals itself
    if any(abs(value / unit - time.time()) < _CLOCK_S for unit in (1, 10**3, 10**6, 10**9)):
        return "a time"
    return int(value) if isinstance(value, int) else float(value)


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


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
