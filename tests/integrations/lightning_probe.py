"""What Lightning's two distributions look like with and without a launcher, as JSON."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import lightning
import pytorch_lightning
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn

from elastic_agent.integrations.lightning import private_names
from elastic_agent.integrations.lightning.needed_source import missing

FABRICS, PYTORCHES = private_names.FABRICS, private_names.PYTORCHES
WORKER = {
    "ELASTIC_AGENT_GENERATION": "1",
    "ELASTIC_AGENT_RUN_ID": "probe",
    "TORCHELASTIC_RUN_ID": "probe",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
}


def adapted() -> list[str]:
    """Which features' replacements are in place, in whichever of Lightning's packages."""
    found: dict[str, set[bool]] = {}
    for one in private_names.ADAPTATIONS:
        for root in one.roots:
            found.setdefault(str(one.feature), set()).add(private_names.in_place(root, one))
    return sorted(feature for feature, places in found.items() if True in places)


def callbacks() -> list[str]:
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    trainers = [lightning.Trainer(**options), pytorch_lightning.Trainer(**options)]
    return [type(one).__name__ for trainer in trainers for one in trainer.callbacks]


def environment_of_a_slurm_script(folder: str) -> dict[str, Any]:
    """What a script for plain ``srun`` gets in a Slurm job, whose folder has a checkpoint of Lightning's requeueing."""
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
    result: dict[str, Any] = {"missing": [line for root in FABRICS + PYTORCHES for line in missing(root)]}
    result["without"] = {"callbacks": callbacks(), "adapted": adapted()}
    os.environ.update(WORKER, ELASTIC_AGENT_LIGHTNING_DISABLE="heartbeats, heartbeets")
    vars(pytorch_lightning)["__version__"] = "2.9.1"
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        result["within"] = {"callbacks": callbacks(), "adapted": adapted()}
        callbacks()
    result["said"] = [line for line in said.getvalue().splitlines() if line.startswith("elastic_agent:")]
    with tempfile.TemporaryDirectory() as folder:
        result["slurm"] = environment_of_a_slurm_script(folder)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
