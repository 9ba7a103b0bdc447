"""A script without heartbeats that hangs on rank 3, as its arguments tell: one for each generation; "none" finishes."""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Deadlocked(Dataset[int]):
    """Takes a lock that is never released."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
        return index


def misbehave(kind: str, numbers: torch.Tensor) -> None:
    if kind == "elsewhere":
        threading.Event().wait()  # HERE
    elif kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "finally":
        try:
            raise ValueError("loss is NaN")  # RAISED
        finally:
            dist.barrier()  # FINALLY
    elif kind == "mismatch":
        dist.reduce(numbers, 0)
    elif kind == "exits":
        os._exit(0)
    elif kind == "loader":
        next(iter(DataLoader(Deadlocked(), num_workers=1)))


def main() -> None:
    dist.init_process_group("gloo")
    kind = sys.argv[int(os.environ["ELASTIC_AGENT_GENERATION"])]
    numbers = torch.ones(250_000)
    for step in range(20):
        if kind != "none" and step == 10 and dist.get_rank() == 3:
            if kind == "uneven":
                break
            misbehave(kind, numbers)
        dist.all_reduce(numbers)  # ALL
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
