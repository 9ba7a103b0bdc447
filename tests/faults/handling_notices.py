"""A worker that heeds notices: takes steps together with the others over gloo, and saves only when it is told to.

It writes down every step, so that one which is lost or done twice is found.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from elastic_agent import client

STEP_S = 0.02


def note(folder: Path, **line: object) -> None:
    """One line, one write: many processes share the file."""
    stamped = {"boottime_s": time.clock_gettime(time.CLOCK_BOOTTIME), **line}
    handle = os.open(folder / "steps.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(handle, (json.dumps(stamped) + "\n").encode())
    os.close(handle)


def agreed(seen_here: bool) -> bool:
    """Return whether a rank has seen it: the same on all of them."""
    seen = torch.tensor([int(seen_here)])
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    return bool(seen)


def received(signum: signal.Signals) -> Callable[[], bool]:
    """Handle the signal from now on; whether it has come."""
    came: list[int] = []
    signal.signal(signum, lambda number, frame: came.append(number))
    return lambda: bool(came)


def save(folder: Path, step: int) -> None:
    draft = folder / f".checkpoint.{os.getpid()}"
    draft.write_text(str(step))
    draft.replace(folder / "checkpoint")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--blind", action="store_true", help="never look at notices")
    parser.add_argument("--handles", help="save and exit by a signal of this name, without the client")
    return parser.parse_args()


class Training:
    """Where it stands, and how it is saved."""

    def __init__(self, folder: Path) -> None:
        me = client.current()
        self.folder = folder
        self.rank = me.placement.rank
        self.who = {
            "node_id": me.node_id,
            "worker_id": me.worker_id,
            "generation": me.placement.generation,
            "rank": self.rank,
            "pid": os.getpid(),
        }
        checkpoint = folder / "checkpoint"
        self.step = int(checkpoint.read_text()) if checkpoint.exists() else 0
        self.note("born", restarts=me.placement.restarts, run_id=me.run_id)

    def note(self, kind: str, **more: object) -> None:
        note(self.folder, kind=kind, step=self.step, **more, **self.who)

    def take_step(self) -> None:
        self.step += 1
        client.heartbeat(self.step)
        self.note("step")

    def save(self, **why: object) -> None:
        """By rank 0, while the others wait."""
        if self.rank == 0:
            save(self.folder, self.step)
        dist.barrier()
        self.note("left", **why)


def main() -> None:
    options = read_options()
    dist.init_process_group("gloo")
    training = Training(options.folder)
    agreement = client.Agreement()
    signalled = received(signal.Signals[options.handles]) if options.handles else None
    while not agreed((options.folder / "finish").exists()):
        time.sleep(STEP_S)
        training.take_step()
        if signalled is not None and agreed(signalled()):
            training.save(reason=options.handles)
            sys.exit(0)
        if options.blind:
            continue
        notice = agreement.notice()
        if notice is not None:
            training.save(reason=notice.reason, left_s=notice.seconds_left)
            client.leave()
    training.note("done")
    dist.barrier()


if __name__ == "__main__":
    main()
