"""A worker that fails again and again: many restarts in a row, and what each left behind.

Every generation meets in one collective; then rank 0 writes down what the agent and its helpers hold, and exits with 1,
until the generation given as the last argument.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def held_by(pid: int) -> tuple[int, int]:
    """Open descriptors and threads of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def main() -> None:
    folder, last = Path(sys.argv[-2]), int(sys.argv[-1])
    generation = int(os.environ["ELASTIC_AGENT_GENERATION"])
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    met_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    if generation > last:
        return
    if dist.get_rank() != 0:
        time.sleep(600)  # ended by the stop that rank 0's failure brings about
    guard = os.getppid()
    agent = parent_of(guard)
    children = children_of(guard)
    spawner, *just_forked = [pid for pid in children if name_of(pid) == "elastic-spawner"]
    # How many standbys wait at this moment is chance; the guard holds two descriptors for each.
    idle = sum(name_of(pid) == "elastic-standby" for pid in children) + len(just_forked)
    fds, threads = held_by(guard)
    line = {
        "generation": generation,
        "met_s": met_s,
        "agent": held_by(agent),
        "guard": (fds - 2 * idle, threads),
        "spawner": (*held_by(spawner), spawner),
        "worker": held_by(os.getpid()),
        "children": len(children) + len(children_of(agent)) - idle,
        "heartbeat_files": Path(f"/proc/{agent}/maps").read_bytes().count(b".beat"),
    }
    with (folder / "restarts.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    os._exit(1)  # spares the interpreter's slow end, of which nothing is to be learnt here


if __name__ == "__main__":
    main()
