"""Every private name of LightlyTrain that the integration replaces.

LightlyTrain computes the number of devices from its arguments, as ``num_nodes`` times ``devices``. It divides the
global batch by it, and stops if the result is not a whole number. It refuses an output folder that is not empty
unless ``resume_interrupted`` or ``overwrite`` is set, so a restarted script fails unless it was written for that.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sized
from pathlib import Path
from typing import Any

from elastic_agent import client
from elastic_agent.integrations import patching
from elastic_agent.integrations.lightly_train.features import Feature
from elastic_agent.integrations.lightning.callback import STATE
from elastic_agent.integrations.patching import Patch
from elastic_agent.integrations.say import say_once
from elastic_agent.integrations.signature import of_values
from elastic_agent.integrations.trainings import continuable, folder_of_run
from elastic_agent.worker_variables import LIGHTLY_TRAIN_DISABLE

ROOT = "lightly_train"
TESTED = "0.18.0"
"""The version of LightlyTrain that the test runs with."""


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
    def train_from_config(config: Any, *args: Any, **kwargs: Any) -> Any:
        # LightlyTrain has its Trainer save there. A folder that is full for another reason is the user's.
        root = str(Path(config.out).resolve())
        told = of_values(ROOT, vars(config))
        if continuable(folder_of_run(root, STATE, client.current().run_id), told):
            config.resume_interrupted = True
            config.overwrite = False
            config.checkpoint = None  # from which training began; both together are an error
            say_once([f"resuming the training in {root}"])
        return original(config, *args, **kwargs)

    return train_from_config


PATCHES = (
    Patch(
        Feature.WORLD,
        "_commands.train_helpers",
        "get_total_num_devices",
        _devices_of_the_world,
        ("num_nodes: int", "num_devices: int"),
    ),
    Patch(
        Feature.WORLD,
        "_commands.common_helpers",
        "get_global_batch_size",
        _divisible_batch,
        ("global_batch_size: int", "total_num_devices: int", "loader_args:"),
    ),
    Patch(
        Feature.WORLD,
        "_commands.common_helpers",
        "get_num_workers",
        _loaders_of_this_node,
        ("num_devices_per_node: int",),
    ),
    Patch(
        Feature.RESUME,
        "_commands.train",
        "train_from_config",
        _continue_after_restart,
        (
            "config.resume_interrupted",
            "config.overwrite",
            "config.out",
            '"last" if config.resume_interrupted',
        ),
    ),
)

_adapted: list[str] = []


def adapt() -> None:
    """Replace what the features need, once."""
    if not _adapted:
        _adapted.append(ROOT)
        features = patching.wanted(LIGHTLY_TRAIN_DISABLE, Feature)
        patching.apply(ROOT, (_version(), TESTED), PATCHES, features)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lightly-train")
    except PackageNotFoundError:
        return "0"
