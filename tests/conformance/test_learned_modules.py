"""Workers that find frameworks preloaded are like those that import them: the second generation is like the first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.agent.test_learning import Job, until

pytestmark = pytest.mark.timeout(400)

SCRIPT = """
import json, os, sys, time
preloaded = [name for name in ("pandas", "lightning", "transformers", "datasets", "wandb") if name in sys.modules]
import torch
import numpy, scipy.stats, sklearn.datasets, pandas, PIL.Image, torchmetrics, lightning, hydra
import transformers.trainer, transformers.models.gpt2.modeling_gpt2
import tokenizers, datasets, accelerate, torch.utils.tensorboard, torch._dynamo, wandb
import atexit, logging, multiprocessing, random, signal, tempfile, threading, warnings
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torchmetrics.utilities.prints import rank_zero_only as metrics_rank_zero_only

def other_than_agents(variables):
    return {name: value for name, value in variables.items() if not name.startswith(("ELASTIC_AGENT_", "MASTER_"))}

state = {
    "rank of Lightning": rank_zero_only.rank,
    "rank of torchmetrics": metrics_rank_zero_only.rank,
    "environment": {name: value for name, value in other_than_agents(os.environ).items() if "TORCHELASTIC" not in name},
    "warnings": [str(one) for one in warnings.filters],
    "loggers": {name: logging.getLogger(name).level for name in ("", "lightning", "transformers", "datasets", "wandb")},
    "handlers": {name: str(logging.getLogger(name).handlers) for name in ("", "lightning", "transformers")},
    "signals": {one.name: str(signal.getsignal(one)) for one in signal.Signals if one.name != "SIGURG"},
    "threads": sorted(one.name for one in threading.enumerate()),
    "start method": multiprocessing.get_start_method(allow_none=True),
    "threads of torch": torch.get_num_threads(),
    "precision": torch.get_float32_matmul_precision(),
    "default type": str(torch.get_default_dtype()),
    "grad": torch.is_grad_enabled(),
    "modules": sorted(name for name in sys.modules if name.partition(".")[0] in (
        "lightning", "transformers", "pandas", "sklearn", "torchmetrics", "PIL", "datasets", "wandb", "hydra")),
}
report = {
    "preloaded": preloaded,
    "slot": int(os.environ["LOCAL_RANK"]),
    "state": state,
    "drawn": [
        *(random.random(), numpy.random.random(), torch.rand(1).item()),
        datasets.fingerprint.fingerprint_rng.random(),
    ],
    "folder": wandb.sdk.data_types._private.MEDIA_TMP.name,
}
sys.stdout.write(json.dumps(report) + "\\n")
while not os.path.exists(f"go-{os.environ['ELASTIC_AGENT_GENERATION']}"):
    time.sleep(0.05)
sys.exit(1)
"""


def test_frameworks_are_as_if_each_worker_imported_them(tmp_path: Path) -> None:
    """wandb, which creates temporary folders when it is imported, is imported by each worker."""
    job = Job(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    with job.agent() as agent:
        first = _by_slot(job.reports(agent))
        assert "creates a temporary file" in until(agent, "wandb.sdk.data_types._private is not preloaded")
        until(agent, "learned which modules train.py imports")
        job.let_generation_end(1)
        second = _by_slot(job.reports(agent))
    assert [one["preloaded"] for one in first] == [[], []]
    assert [one["preloaded"] for one in second] == [["pandas", "lightning", "transformers", "datasets"]] * 2
    for before, after in zip(first, second, strict=True):
        for item, value in before["state"].items():
            assert after["state"][item] == value, item
    drawn = [number for one in (*first, *second) for number in one["drawn"]]
    assert len(set(drawn)) == len(drawn)
    assert len({one["folder"] for one in (*first, *second)}) == 4


def _by_slot(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(reports, key=lambda one: json.dumps(one["slot"]))
