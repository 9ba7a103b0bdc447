"""A worker that heeds notices: takes steps together with the others over gloo, and saves only when it is told to.

It writes down every step, so that one which is lost or done twice is found.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from notes import note

from elastic_agent import client

STEP_S = 0.02


def agreed(seen_here: bool) -> bool:
    """Return whether a rank has seen it: the same on all of them."""
    seen = torch.tensor([int(seen_here)])
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    return bool(seen)


def save(folder: Path, step: int) -> None:
    draft = folder / f".checkpoint.{os.getpid()}"
    draft.write_text(str(step))
    draft.replace(folder / "checkpoint")


class Training:
    """Where it stands, and how it is saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        checkpoint = folder / "checkpoint"
        self.step = int(checkpoint.read_text()) if checkpoint.exists() else 0
        self.note("born")

    def note(self, kind: str, **more: object) -> None:
        note(self.folder, kind, step=self.step, **more)

    def take_step(self) -> None:
        self.step += 1
        client.heartbeat(self.step)
        self.note("step")

    def save(self, **why: object) -> None:
        """By rank 0, while the others wait."""
        if dist.get_rank() == 0:
            save(self.folder, self.step)
        dist.barrier()
        self.note("left", **why)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    folder: Path = parser.parse_args().folder
    dist.init_process_group("gloo")
    training = Training(folder)
    agreement = client.Agreement()
    while not agreed((folder / "finish").exists()):
        time.sleep(STEP_S)
        training.take_step()
        notice = agreement.notice()
        if notice is not None:
            training.save(reason=notice.reason, left_s=notice.seconds_left)
            client.leave()
    training.note("done")
    dist.barrier()
    dist.destroy_process_group()  # else torch may abort the interpreter that ends


if __name__ == "__main__":
    main()
