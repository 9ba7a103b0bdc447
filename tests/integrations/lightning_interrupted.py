"""``python lightning_interrupted.py FOLDER CASE ...``: trainings of one worker, whole and left on a notice, as JSON.

Each training is a process of its own, forked from one that has imported Lightning. The heartbeat files are real ones.
"""

from __future__ import annotations

from notes import ONE_WORKER, WORKER  # isort: skip

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning
import omegaconf  # noqa: F401 - when Lightning saves, it imports this, once in each of the processes
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader, Dataset

from elastic_agent.client._cells import HeartbeatFile

CASES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "epochs": ({"max_epochs": 3}, [6, 13]),
    "steps": ({"max_epochs": -1, "max_steps": 33}, [13]),
    "accumulating": ({"max_epochs": 3, "accumulate_grad_batches": 2}, [5]),
    "validating": ({"max_epochs": 3, "val_check_interval": 3}, [6]),
    "saved-by-a-thread": ({"max_epochs": 3, "plugins": [AsyncCheckpointIO()]}, [6]),
    "in-order": ({"max_epochs": 2}, [6]),
    "from-last": (
        {
            "max_epochs": 2,
            "ckpt_path": "last",
            "enable_checkpointing": True,
            "callbacks": [ModelCheckpoint(every_n_train_steps=5, save_last=True)],
        },
        [6],
    ),
}
"""Arguments of the trainer (``ckpt_path``: of ``fit``), and after which batches a notice comes; an epoch has 13."""

NOT_SHUFFLED = "in-order"
"""The case whose loader uses the samples in their order."""


class Numbers(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([index / 50]), index


class Dropping(lightning.LightningModule):
    """Its result depends on the order of the samples, the optimizer's state, and random numbers."""

    def __init__(self, cells: HeartbeatFile, notice_after: int | None) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(
            torch.nn.Linear(1, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
        )
        self.cells, self._notice_after = cells, notice_after
        self.batches: list[tuple[int, int, list[int]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        values, ids = batch
        self.batches.append((self.trainer.current_epoch, batch_idx, ids.tolist()))
        if len(self.batches) == self._notice_after:
            due_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) + 3600 * 10**9
            self.cells.notify(1, "drain", due_ns)
        return (self.network(values) - values).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", (self.network(batch[0]) - batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit(root: Path, cells: HeartbeatFile, notice_after: int | None, options: dict[str, Any]) -> None:
    os.environ.update(WORKER | ONE_WORKER, ELASTIC_AGENT_HEARTBEAT=cells.path, ELASTIC_AGENT_RUN_ID=root.name)
    os.environ["TORCHELASTIC_RUN_ID"] = root.name
    lightning.seed_everything(3)
    options = {"enable_checkpointing": False, **options}
    checkpoint = options.pop("ckpt_path", None)
    model = Dropping(cells, notice_after)
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        **options,
    )
    validation = DataLoader(Numbers(), batch_size=25) if "val_check_interval" in options else None
    shuffle = not root.name.startswith(NOT_SHUFFLED)
    try:
        trainer.fit(
            model, DataLoader(Numbers(), batch_size=4, shuffle=shuffle), validation, ckpt_path=checkpoint
        )
    finally:
        weights = [value.hex() for parameter in model.parameters() for value in parameter.flatten().tolist()]
        (root / "result.json").write_text(json.dumps({"batches": model.batches, "weights": weights}))


def result(root: Path, notice_after: int | None, options: dict[str, Any]) -> dict[str, Any]:
    """Of one process."""
    root.mkdir(exist_ok=True)
    cells = HeartbeatFile.create(root, 1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            fit(root, cells, notice_after, options)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    left, (beats, step) = cells.left(0), cells.read(0)
    cells.close()
    found: dict[str, Any] = json.loads((root / "result.json").read_text())
    return {**found, "code": os.waitstatus_to_exitcode(status), "left": left, "beats": beats, "step": step}


def main() -> None:
    gc.freeze()  # each process would look through Lightning for garbage
    folder = Path(sys.argv[1])
    told: dict[str, Any] = {}
    for name in sys.argv[2:]:
        options, notices = CASES[name]
        told[name] = {"whole": result(folder / name, None, options), "parts": []}
        for after in notices:
            root = folder / f"{name}-{after}"
            told[name]["parts"].append([result(root, after, options), result(root, None, options)])
    print(json.dumps(told), flush=True)
    os._exit(0)  # to free all that is imported takes seconds


if __name__ == "__main__":
    main()
