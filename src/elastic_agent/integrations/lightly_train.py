"""Runs unmodified LightlyTrain scripts in elastic worlds, on top of the integration for Lightning.

Workers call :func:`install` when the script imports ``lightly_train``. docs/script.md describes the features.

LightlyTrain computes the number of devices from its arguments, as ``num_nodes`` times ``devices``. It divides the
global batch by it, and stops if the result is not a whole number. It refuses an output folder that is not empty
unless ``resume_interrupted`` or ``overwrite`` is set, so a restarted script fails unless it was written for that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sized
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

from elastic_agent import client
from elastic_agent.integrations.lightning.callback import STATE
from elastic_agent.integrations.patching import Patches, say_once, wanted
from elastic_agent.integrations.signature import of_values
from elastic_agent.integrations.trainings import continuable, folder_of_run
from elastic_agent.worker_variables import GENERATION, LIGHTLY_TRAIN_DISABLE

__all__ = ["install"]

ROOT = "lightly_train"
TESTED = "0.18.0"
"""The version of LightlyTrain that the test runs with."""

PATCHES = Patches()


class Feature(StrEnum):
    """A part of the integration; its value is the name in ``ELASTIC_AGENT_LIGHTLY_TRAIN_DISABLE``."""

    WORLD = "world"
    """Divide the batch by the number of workers in the world, not by that in the script's arguments."""

    RESUME = "resume"
    """After a restart, continue the training that this run has begun in the output folder."""


def install() -> None:
    """Adapt ``lightly_train``, in a worker of elastic-agent only; called once, after it was imported."""
    if GENERATION not in os.environ:  # unlike the run id, it is never set by users
        return
    try:
        version = metadata.version("lightly-train")
    except metadata.PackageNotFoundError:
        version = "0"
    PATCHES.apply(ROOT, (version, TESTED), wanted(LIGHTLY_TRAIN_DISABLE, Feature))


@PATCHES.replace(
    Feature.WORLD, "_commands.train_helpers:get_total_num_devices", "num_nodes: int", "num_devices: int"
)
def _devices_of_the_world(original: Callable[..., int], num_nodes: int, num_devices: int) -> int:
    return int(os.environ["WORLD_SIZE"])


@PATCHES.replace(
    Feature.WORLD,
    "_commands.common_helpers:get_global_batch_size",
    *("global_batch_size: int", "total_num_devices: int", "loader_args:"),
)
def _divisible_batch(
    original: Callable[..., int],
    global_batch_size: int,
    dataset: Any,
    total_num_devices: int,
    loader_args: dict[str, Any] | None,
) -> int:
    if loader_args is None or "batch_size" not in loader_args:
        most = len(dataset) if isinstance(dataset, Sized) else global_batch_size
        wanted_size = min(global_batch_size, most)
        whole = wanted_size - wanted_size % total_num_devices
        if 0 < whole < wanted_size:
            say_once(
                [f"using a global batch of {whole} instead of {wanted_size}: {total_num_devices} workers"]
            )
            global_batch_size = whole
    return original(
        global_batch_size=global_batch_size,
        dataset=dataset,
        total_num_devices=total_num_devices,
        loader_args=loader_args,
    )


@PATCHES.replace(Feature.WORLD, "_commands.common_helpers:get_num_workers", "num_devices_per_node: int")
def _loaders_of_this_node(original: Callable[..., int], num_workers: Any, num_devices_per_node: int) -> int:
    # The world's size divided by the script's number of nodes may be zero.
    return original(num_workers=num_workers, num_devices_per_node=int(os.environ["LOCAL_WORLD_SIZE"]))


@PATCHES.replace(
    Feature.RESUME,
    "_commands.train:train_from_config",
    *("config.resume_interrupted", "config.overwrite", "config.out", '"last" if config.resume_interrupted'),
)
def _continue_after_restart(original: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
    # LightlyTrain has its Trainer save there. A folder that is full for another reason is the user's.
    root = str(Path(config.out).resolve())
    settings = of_values(ROOT, vars(config))
    if continuable(folder_of_run(root, STATE, client.current().run_id), settings):
        config.resume_interrupted = True
        config.overwrite = False
        config.checkpoint = None  # from which training began; both together are an error
        say_once([f"resuming the training in {root}"])
    return original(config, *args, **kwargs)
