"""Runs examples/accelerate_train.py as it stands, and writes down the samples of every finished step.

A step takes a while until the file ``finish`` is there, so that a test has the time to change the world.
"""

from __future__ import annotations

from notes import note  # isort: skip

import argparse
import json
import runpy
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

import elastic_agent.data
from elastic_agent import client
from elastic_agent.data import ElasticSampler

EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_train.py"
STEP_S = 0.4


def record(folder: Path) -> None:
    """Samples are recognised by their targets, where the loss is computed."""
    used: list[float] = []
    dataset_init, mse_loss = TensorDataset.__init__, functional.mse_loss

    def recording_init(self: TensorDataset, *tensors: torch.Tensor) -> None:
        dataset_init(self, *tensors)
        (folder / "targets.json").write_text(json.dumps(tensors[1].flatten().tolist()))

    def recording_loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        used.extend(targets.flatten().tolist())
        return mse_loss(inputs, targets)

    class RecordingSampler(ElasticSampler):
        def advance(self, samples: int) -> None:
            super().advance(samples)
            rank = client.current().placement.rank
            note(folder, "step", rank=rank, step=self.samples_finished, epoch=self.epoch, targets=used)
            used.clear()
            if not (folder / "finish").exists():
                time.sleep(STEP_S)

    TensorDataset.__init__ = recording_init  # type: ignore[method-assign]
    functional.mse_loss = recording_loss  # type: ignore[assignment]
    elastic_agent.data.ElasticSampler = RecordingSampler  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    options, arguments = parser.parse_known_args()
    record(options.folder)
    sys.argv = [str(EXAMPLE), "--checkpoint-dir", str(options.folder), *arguments]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    main()
