"""A worker of a service: trains in lockstep over gloo until the file ``finish`` is there, and saves when told to stop.

Its files are in the folder of its script. ``steps.jsonl`` gets a line per step and rank; ``checkpoint.json`` holds the
last step that was saved, by rank 0: each twentieth, and the one at which SIGTERM came, or a notice,
at which it looks if there is a file ``notices``. Saving takes as many seconds as
``slow`` says. It starts a process that has nothing to do with it any more, and leaves it to others to end it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from elastic_agent import client

FOLDER = Path(__file__).parent
MINE = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


def note(**line: object) -> None:
    """One line, one write: many processes share the file."""
    handle = os.open(FOLDER / "steps.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(handle, (json.dumps(line) + "\n").encode())
    os.close(handle)


def load() -> int:
    try:
        return int(json.loads((FOLDER / "checkpoint.json").read_text())["step"])
    except FileNotFoundError:
        return 0


def save(step: int, why: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        time.sleep(float((FOLDER / "slow").read_text()))
    draft = FOLDER / f".checkpoint.{os.getpid()}"
    draft.write_text(json.dumps({"step": step, "why": why}))
    draft.replace(FOLDER / "checkpoint.json")


def main() -> None:
    me = client.current()
    told: list[int] = []

    def tell(signum: int, frame: FrameType | None) -> None:
        told.append(signum)

    signal.signal(signal.SIGTERM, tell)
    dist.init_process_group("gloo")
    step = load()
    note(
        kind="begun",
        node=me.node_id,
        pid=os.getpid(),
        inherited=[name for name in MINE if name in os.environ],
    )
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    print("a line of the worker's own", flush=True)
    agreement = client.Agreement() if (FOLDER / "notices").exists() else None
    # All ranks decide to end at the same step, because one that left alone would leave the others hanging.
    while True:
        state = torch.tensor([len(told), (FOLDER / "finish").exists()], dtype=torch.int64)
        dist.all_reduce(state)
        if state.any():
            break
        step += 1
        client.heartbeat(step)
        note(
            kind="step",
            step=step,
            node=me.node_id,
            rank=me.placement.rank,
            world=me.placement.world_size,
            generation=me.placement.generation,
        )
        notice = agreement.notice() if agreement is not None else None
        if notice is not None:
            if me.placement.rank == 0:
                save(step, notice.reason)
            client.leave()
        if step % 20 == 0 and me.placement.rank == 0:
            save(step, "time")
        time.sleep(0.02)
    if me.placement.rank == 0:
        save(step, "told" if state[0] else "finished")
    while state[0] and not told:  # another node leaves: this one's agent starts the next generation
        time.sleep(0.01)
    dist.destroy_process_group()
    sys.exit(143 if told else 0)


if __name__ == "__main__":
    main()
