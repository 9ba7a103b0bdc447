"""What Lightning's two distributions look like with and without a launcher, as JSON."""

from __future__ import annotations

from notes import ONE_WORKER, WORKER  # isort: skip

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning
import pytorch_lightning
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn

from elastic_agent.integrations import patching
from elastic_agent.integrations.lightning.private_names import FABRIC, FABRICS, PYTORCH, PYTORCHES, Feature

PATCHES = {**dict.fromkeys(FABRICS, FABRIC), **dict.fromkeys(PYTORCHES, PYTORCH)}


def adapted() -> list[str]:
    """Return which features' replacements are in place, in whichever of Lightning's packages."""
    found: set[str] = set()
    for root, patches in PATCHES.items():
        for patch in patches.all:
            if patch.replace is not None:
                owner, name, attribute = patch.find(root)
                function = attribute.fget if isinstance(attribute, property) else getattr(owner, name)
                if function.__code__.co_filename == patching.__file__:
                    found.add(str(patch.feature))
    return sorted(found)


def callbacks() -> list[str]:
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    trainers = [lightning.Trainer(**options), pytorch_lightning.Trainer(**options)]
    return [type(callback).__name__ for trainer in trainers for callback in trainer.callbacks]


def environment_of_a_slurm_script(folder: str) -> dict[str, Any]:
    """Return what a script for ``srun`` gets in a Slurm job whose folder has a checkpoint of Lightning's requeueing."""
    os.environ.update(
        SLURM_JOB_ID="7", SLURM_NTASKS="1", SLURM_PROCID="3", SLURM_LOCALID="2", SLURM_NODEID="3"
    )
    (Path(folder) / "hpc_ckpt_1.ckpt").touch()
    plugin = SLURMEnvironment(auto_requeue=True)
    trainer = lightning.Trainer(accelerator="cpu", logger=False, plugins=[plugin], default_root_dir=folder)
    connector = trainer._checkpoint_connector
    path = connector._select_ckpt_path(TrainerFn.FITTING, None, model_provided=True, model_connected=True)
    environment = type(trainer._accelerator_connector.cluster_environment).__name__
    return {"environment": environment, "ckpt_path": path, "rank": trainer.global_rank}


def main() -> None:
    result: dict[str, Any] = {
        "misfits": [
            patches.misfits(root, frozenset(Feature), read_source=True) for root, patches in PATCHES.items()
        ],
        "version": lightning.__version__,
    }
    result["without"] = {"callbacks": callbacks(), "adapted": adapted()}
    os.environ.update(WORKER | ONE_WORKER, ELASTIC_AGENT_LIGHTNING_DISABLE="sampler, sampels")
    for package in (pytorch_lightning, sys.modules["lightning_fabric"], lightning.pytorch, lightning.fabric):
        vars(package)["__version__"] = "2.9.1"
        loops = sys.modules.get(f"{package.__name__}.loops.training_epoch_loop")
        if loops is not None:  # what the last patch of a feature needs
            del vars(loops)["_TrainingEpochLoop"]._num_ready_batches_reached
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        result["within"] = {"callbacks": callbacks(), "adapted": adapted()}
        callbacks()
    result["said"] = [line for line in said.getvalue().splitlines() if line.startswith("elastic_agent:")]
    with tempfile.TemporaryDirectory() as folder:
        result["slurm"] = environment_of_a_slurm_script(folder)
    print(json.dumps(result), flush=True)
    os._exit(0)  # to free all that is imported takes seconds


if __name__ == "__main__":
    main()
