"""A worker that heeds notices: trains over gloo, saves only when it is told to, and writes down what it does.

What is trained does not depend on the number of ranks: each sample's gradient is computed by one of them, all are
gathered and added in the order of the samples. So the weights after so many steps are the same, bit for bit, whatever
happened in between; unless a step was lost or done twice.
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
from typing import Any

import torch
import torch.distributed as dist

from elastic_agent import client

SAMPLES = 8


def note(folder: Path, **line: object) -> None:
    """One line, one write: many processes share the file."""
    stamped = {"boottime_s": time.clock_gettime(time.CLOCK_BOOTTIME), **line}
    handle = os.open(folder / "steps.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(handle, (json.dumps(stamped) + "\n").encode())
    os.close(handle)


def gradient(weights: torch.Tensor, step: int, sample: int) -> torch.Tensor:
    """Of one sample's squared error, by hand."""
    x = torch.sin(torch.arange(len(weights)) * (sample + 1) + step)
    return 2 * (weights @ x - sample) * x


def train(weights: torch.Tensor, step: int) -> torch.Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    rounds = -(-SAMPLES // size)
    total = torch.zeros_like(weights)
    for turn in range(rounds):
        sample = turn * size + rank
        mine = gradient(weights, step, sample) if sample < SAMPLES else torch.zeros_like(weights)
        all_of_them = [torch.empty_like(weights) for _ in range(size)]
        dist.all_gather(all_of_them, mine)
        for one in all_of_them[: SAMPLES - turn * size]:
            total += one
    return weights - 0.01 * total


def agreed(seen_here: bool) -> bool:
    """Whether a rank has seen it: the same on all of them."""
    seen = torch.tensor([int(seen_here)])
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    return bool(seen)


def received(signum: signal.Signals) -> Callable[[], bool]:
    """Handle the signal from now on; whether it has come."""
    came: list[int] = []
    signal.signal(signum, lambda number, frame: came.append(number))
    return lambda: bool(came)


def save(folder: Path, state: dict[str, Any]) -> None:
    draft = folder / f".checkpoint.{os.getpid()}"
    torch.save(state, draft)
    draft.replace(folder / "checkpoint.pt")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--pause", type=float, default=0.02, help="what a step takes, in seconds")
    parser.add_argument("--blind", action="store_true", help="never look at notices")
    parser.add_argument("--stubborn", action="store_true", help="look at notices, but do not leave")
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
        state = {"step": 0, "weights": torch.linspace(-1, 1, 16)}
        if (folder / "checkpoint.pt").exists():
            state = torch.load(folder / "checkpoint.pt")
        self.step: int = state["step"]
        self.weights: torch.Tensor = state["weights"]
        self.note("born", restarts=me.placement.restarts, run_id=me.run_id)

    def note(self, kind: str, **more: object) -> None:
        note(self.folder, kind=kind, step=self.step, **more, **self.who)

    def take_step(self) -> None:
        self.weights = train(self.weights, self.step)
        self.step += 1
        client.heartbeat(self.step)
        self.note("step")

    def save(self, **why: object) -> None:
        """By rank 0, while the others wait."""
        if self.rank == 0:
            save(self.folder, {"step": self.step, "weights": self.weights})
        dist.barrier()
        self.note("left", **why)


def main() -> None:
    options = read_options()
    dist.init_process_group("gloo")
    training = Training(options.folder)
    agreement = client.Agreement()
    told = False
    signalled = received(signal.Signals[options.handles]) if options.handles else None
    while training.step < options.steps:
        if agreed((options.folder / "finish").exists()):
            break
        time.sleep(options.pause)
        training.take_step()
        if signalled is not None and agreed(signalled()):
            training.save(reason=options.handles)
            sys.exit(0)
        if options.blind:
            continue
        seen = client.notice()
        if not told and seen is not None:
            told = True
            training.note("told", reason=seen.reason)
        notice = agreement.notice()
        if notice is not None and not options.stubborn:
            training.save(reason=notice.reason, left_s=notice.seconds_left)
            client.leave()
    if training.rank == 0:
        torch.save(training.weights, options.folder / "weights.pt")
    training.note("done")
    dist.barrier()


if __name__ == "__main__":
    main()
