"""Every private name of LightlyTrain that the integration replaces.

LightlyTrain computes the number of devices from its arguments, as ``num_nodes`` times ``devices``. It divides the
global batch by it, and stops if the result is not a whole number. It refuses an output folder that is not empty
unless ``resume_interrupted`` or ``overwrite`` is set, so a restarted script fails unless it was written for that.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_agent.integrations.inspection import Versions
from elastic_agent.integrations.lightly_train.features import Feature
from elastic_agent.integrations.say import say, say_once
from elastic_agent.worker_variables import GENERATION

MODULE = "lightly_train"
TESTED = Versions((0, 18), (0, 19))

_ADAPTED = "_elastic_agent_adapted"


@dataclass(frozen=True)
class Adaptation:
    """One function that is replaced."""

    feature: Feature
    module: str
    name: str
    replace: Callable[[Any], Any]
    """Gets the present function, returns its replacement."""

    def __str__(self) -> str:
        return f"{MODULE}.{self.module}.{self.name}"


# -- the world -----------------------------------------------------------------------------------


def _devices_of_the_world(original: Any) -> Any:
    @functools.wraps(original)
    def get_total_num_devices(num_nodes: int, num_devices: int) -> int:
        return int(os.environ["WORLD_SIZE"])

    return get_total_num_devices


def _divisible_batch(original: Any) -> Any:
    @functools.wraps(original)
    def get_global_batch_size(
        global_batch_size: int, dataset: Any, total_num_devices: int, loader_args: dict[str, Any] | None
    ) -> int:
        if loader_args is None or "batch_size" not in loader_args:
            most = len(dataset) if isinstance(dataset, Sized) else global_batch_size
            wanted = min(global_batch_size, most)
            whole = wanted - wanted % total_num_devices
            if 0 < whole < wanted:
                say_once(
                    [f"using a global batch of {whole} instead of {wanted}: {total_num_devices} workers"]
                )
                global_batch_size = whole
        size: int = original(
            global_batch_size=global_batch_size,
            dataset=dataset,
            total_num_devices=total_num_devices,
            loader_args=loader_args,
        )
        return size

    return get_global_batch_size


def _loaders_of_this_node(original: Any) -> Any:
    @functools.wraps(original)
    def get_num_workers(num_workers: Any, num_devices_per_node: int) -> int:
        # The world's size divided by the script's number of nodes may be zero.
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        count: int = original(num_workers=num_workers, num_devices_per_node=here)
        return count

    return get_num_workers


# -- the output folder ---------------------------------------------------------------------------


def _continue_after_restart(original: Any) -> Any:
    @functools.wraps(original)
    def from_config(config: Any, *args: Any, **kwargs: Any) -> Any:
        if int(os.environ[GENERATION]) > 1:
            _continue(config)
        return original(config, *args, **kwargs)

    return from_config


def _continue(config: Any) -> None:
    """Have it restore the last checkpoint, or use the folder if there is none yet: the run's own worker made it."""
    last = Path(config.out) / "checkpoints" / "last.ckpt"
    if last.exists():
        config.resume_interrupted = True
        config.overwrite = False
        config.checkpoint = None  # from which training began; both together are an error
        if os.environ.get("RANK") == "0":
            say(f"resuming from {last}")
    elif not config.resume_interrupted:
        config.overwrite = True


ADAPTATIONS = (
    Adaptation(Feature.WORLD, "_commands.train_helpers", "get_total_num_devices", _devices_of_the_world),
    Adaptation(Feature.WORLD, "_commands.common_helpers", "get_global_batch_size", _divisible_batch),
    Adaptation(Feature.WORLD, "_commands.common_helpers", "get_num_workers", _loaders_of_this_node),
    Adaptation(Feature.RESUME, "_commands.train", "train_from_config", _continue_after_restart),
    Adaptation(Feature.RESUME, "_commands.train_task", "_train_task_from_config", _continue_after_restart),
)


def apply(features: frozenset[Feature]) -> list[str] | None:
    """Replace what the features need; sentences about what is not as expected. None if it was done before."""
    package = importlib.import_module(MODULE)
    if getattr(package, _ADAPTED, False):
        return None
    setattr(package, _ADAPTED, True)
    version = _version()
    problems = (
        []
        if version in TESTED
        else [f"{MODULE} {version} is not tested with elastic-agent; expected {TESTED}"]
    )
    for one in ADAPTATIONS:
        if one.feature in features:
            module = importlib.import_module(f"{MODULE}.{one.module}")
            original = getattr(module, one.name, None)
            if original is None:
                problems.append(f"{one} does not exist in this version: {one.feature} is disabled in part")
            else:
                setattr(module, one.name, one.replace(original))
    return problems


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lightly-train")
    except PackageNotFoundError:
        return "0"
