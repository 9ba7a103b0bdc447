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

from elastic_agent import linux


def held_by(pid: int) -> tuple[int, int]:
    """Open descriptors and threads of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


def main() -> None:
    folder, last = Path(sys.argv[-2]), int(sys.argv[-1])
    generation = int(os.environ["ELASTIC_AGENT_GENERATION"])
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    met_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    if generation > last:
        dist.barrier()
        dist.destroy_process_group()  # else torch may abort the interpreter that ends
        return
    if dist.get_rank() != 0:
        time.sleep(600)  # ended by the stop that rank 0's failure brings about
    guard = os.getppid()
    agent = int(linux.stat_fields(guard)[1])
    children = linux.children(guard)
    spawner, *just_forked = [pid for pid in children if linux.process_name(pid) == "elastic-spawner"]
    # How many standbys wait at this moment is chance; the guard holds two descriptors for each.
    idle = sum(linux.process_name(pid) == "elastic-standby" for pid in children) + len(just_forked)
    fds, threads = held_by(guard)
    line = {
        "generation": generation,
        "met_s": met_s,
        "agent": held_by(agent),
        "guard": (fds - 2 * idle, threads),
        "spawner": (*held_by(spawner), spawner),
        "worker": held_by(os.getpid()),
        "children": len(children) + len(linux.children(agent)) - idle,
        "heartbeat_files": Path(f"/proc/{agent}/maps").read_bytes().count(b".beat"),
    }
    with (folder / "restarts.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    os._exit(1)  # spares the interpreter's slow end, of which nothing is to be learnt here


if __name__ == "__main__":
    main()
