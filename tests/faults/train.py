"""A worker for fault tests: trains in lockstep over gloo, checkpoints every step, writes down what it does.

Each step is one all_reduce. Every rank appends a line per step to ``steps.jsonl``; rank 0 writes the checkpoint
(atomically) after each step. ``--fail`` makes one worker fail once: ``WORKER_ID:STEP:HOW`` with HOW one of
exception, exit, hang, daemon (leaves a daemonised grandchild behind, then goes on).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from elastic_agent import client


def note(folder: Path, **line: object) -> None:
    """One line, one write: many processes share the file."""
    stamped = {"boottime_s": time.clock_gettime(time.CLOCK_BOOTTIME), **line}
    handle = os.open(folder / "steps.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(handle, (json.dumps(stamped) + "\n").encode())
    os.close(handle)


def load(folder: Path) -> int:
    try:
        return int(json.loads((folder / "checkpoint.json").read_text())["step"])
    except FileNotFoundError:
        return 0


def save(folder: Path, step: int, run_id: str) -> None:
    draft = folder / f".checkpoint.{os.getpid()}"
    draft.write_text(json.dumps({"step": step, "run_id": run_id}))
    draft.replace(folder / "checkpoint.json")


def daemonise() -> None:
    """Leave a grandchild behind that has its own session and ignores SIGTERM."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", "import signal,time; signal.signal(15, 1); time.sleep(600)"])
        os._exit(0)
    os.wait()


def misbehave(fail: str | None, worker_id: str, step: int, folder: Path) -> None:
    """Do what ``--fail`` says, once in the life of the test (or each time, with ``always``)."""
    if fail is None:
        return
    who, at, how = fail.rsplit(":", 2)
    marker = folder / "failed-once"
    always = how.startswith("always-")
    if who != worker_id or step < int(at) or (marker.exists() and not always):
        return
    marker.touch()
    how = how.removeprefix("always-")
    if how == "exception":
        raise RuntimeError("boom of the test")
    if how == "exit":
        os._exit(17)
    if how == "hang":
        while True:
            time.sleep(3600)
    if how == "daemon":
        daemonise()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--fail")
    options = parser.parse_args()
    folder: Path = options.folder
    me = client.current()
    place = me.placement
    note(folder, kind="born", worker_id=me.worker_id, generation=place.generation, rank=place.rank, pid=os.getpid())
    dist.init_process_group("gloo")
    begun = torch.tensor([load(folder)])
    dist.broadcast(begun, 0)
    step = int(begun.item())
    while step < options.steps:
        total = torch.ones(1)
        dist.all_reduce(total)
        assert int(total.item()) == place.world_size, "the collective reached another world"
        step += 1
        client.heartbeat(step)
        note(
            folder,
            kind="step",
            step=step,
            run_id=me.run_id,
            node_id=me.node_id,
            worker_id=me.worker_id,
            generation=place.generation,
            rank=place.rank,
            world_size=place.world_size,
            restarts=place.restarts,
            pid=os.getpid(),
        )
        if place.rank == 0:
            save(folder, step, me.run_id)
        misbehave(options.fail, me.worker_id, step, folder)
        time.sleep(options.step_s)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
