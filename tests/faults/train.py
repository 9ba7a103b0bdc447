"""A worker for fault tests: trains in lockstep over gloo, checkpoints every step, writes down what it does.

Each step is one all_reduce. Every rank appends a line per step to ``steps.jsonl``; rank 0 writes the checkpoint
(atomically) after each step. It trains until the file ``finish`` is there. With ``--alone``, it does all that without
torch: rank 0 counts, and the others follow its checkpoint.

A worker obeys the order it finds in ``order.NODE.SLOT`` at the end of a step: exception, exit, hang, daemon
(leaves a daemonised grandchild behind, then goes on). An order is obeyed once, unless it begins with ``always-``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from notes import note

from elastic_agent import client


def load(folder: Path) -> int:
    try:
        return int(json.loads((folder / "checkpoint.json").read_text())["step"])
    except FileNotFoundError:
        return 0


def save(folder: Path, step: int, run_id: str) -> None:
    draft = folder / f".checkpoint.{os.getpid()}"
    draft.write_text(json.dumps({"step": step, "run_id": run_id}))
    draft.replace(folder / "checkpoint.json")


def daemonise(folder: Path) -> None:
    """Leave a grandchild behind that has its own session and ignores SIGTERM."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            note(folder, "daemon")
            code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
            os.execv(sys.executable, [sys.executable, "-S", "-c", code])
        os._exit(0)
    os.wait()


def obey(folder: Path, worker_id: str) -> None:
    """Do what the test ordered this worker to do, if anything."""
    order = folder / f"order.{worker_id.replace('/', '.')}"
    try:
        how = order.read_text()
    except FileNotFoundError:
        return
    if not how.startswith("always-"):
        order.unlink()
    match how.removeprefix("always-"):
        case "exception":
            raise RuntimeError("boom of the test")
        case "exit":
            os._exit(17)
        case "hang":
            while True:
                time.sleep(3600)
        case "daemon":
            daemonise(folder)
        case unknown:
            raise AssertionError(f"unknown order {unknown}")


def steps_together(folder: Path, place: client.Placement, step_s: float) -> Iterator[int]:
    """Yield each step that all ranks took together."""
    import torch  # takes seconds
    import torch.distributed as dist

    dist.init_process_group("gloo")
    begun = torch.tensor([load(folder)])
    dist.broadcast(begun, 0)
    step = int(begun.item())
    finish = False
    while not finish:
        asked = place.rank == 0 and (folder / "finish").exists()
        total = torch.tensor([1, int(asked)])
        dist.all_reduce(total)
        assert int(total[0]) == place.world_size, "the collective reached another world"
        finish = bool(total[1])
        step += 1
        yield step
        time.sleep(step_s)
    dist.barrier()
    dist.destroy_process_group()


def steps_alone(folder: Path, place: client.Placement, step_s: float) -> Iterator[int]:
    """Yield each step of rank 0; for other ranks, each that they find in the checkpoint."""
    step = load(folder)
    while not (folder / "finish").exists():
        reached = step + 1 if place.rank == 0 else load(folder)
        if reached > step:
            step = reached
            yield step
        time.sleep(step_s)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--step-s", type=float, default=0.03)
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()
    folder: Path = options.folder
    me = client.current()
    place = me.placement
    note(folder, "born")
    steps = steps_alone if options.alone else steps_together
    for step in steps(folder, place, options.step_s):
        client.heartbeat(step)
        note(folder, "step", step=step)
        if place.rank == 0:
            save(folder, step, me.run_id)
        obey(folder, me.worker_id)
    os._exit(0)  # spares the interpreter's slow end, of which nothing is to be learnt here


if __name__ == "__main__":
    main()
