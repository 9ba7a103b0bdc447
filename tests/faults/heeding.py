"""A worker that heeds notices: trains over gloo, saves only when it is told to, and writes down what it does.

What is trained does not depend on the number of ranks: each sample's gradient is computed by one of them, all are
gathered and added in the order of the samples. So the weights after so many steps are the same, bit for bit, whatever
happened in between; unless a step was lost or done twice.
"""

from __future__ import annotations

import argparse
import json
import os
import time
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


def agreed_to_finish(folder: Path) -> bool:
    """Whether a rank has seen that training may end: the same on all of them."""
    seen = torch.tensor([int((folder / "finish").exists())])
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    return bool(seen)


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
    return parser.parse_args()


def main() -> None:
    options = read_options()
    folder = options.folder
    me = client.current()
    dist.init_process_group("gloo")
    state = {"step": 0, "weights": torch.linspace(-1, 1, 16)}
    if (folder / "checkpoint.pt").exists():
        state = torch.load(folder / "checkpoint.pt")
    step, weights = state["step"], state["weights"]
    place = me.placement
    who = {
        "node_id": me.node_id,
        "worker_id": me.worker_id,
        "generation": place.generation,
        "rank": place.rank,
        "pid": os.getpid(),
    }
    note(folder, kind="born", step=step, restarts=place.restarts, run_id=me.run_id, **who)
    agreement = client.Agreement()
    told = False
    while step < options.steps:
        if agreed_to_finish(folder):
            break
        time.sleep(options.pause)
        weights = train(weights, step)
        step += 1
        client.heartbeat(step)
        note(folder, kind="step", step=step, **who)
        if options.blind:
            continue
        seen = client.notice()
        if not told and seen is not None:
            told = True
            note(folder, kind="told", step=step, reason=seen.reason, **who)
        notice = agreement.notice()
        if notice is not None and not options.stubborn:
            if place.rank == 0:
                save(folder, {"step": step, "weights": weights})
            dist.barrier()
            note(folder, kind="left", step=step, reason=notice.reason, left_s=notice.seconds_left, **who)
            client.leave()
    if place.rank == 0:
        torch.save(weights, folder / "weights.pt")
    note(folder, kind="done", step=step, **who)
    dist.barrier()


if __name__ == "__main__":
    main()
