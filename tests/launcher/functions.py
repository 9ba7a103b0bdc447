"""Functions that the workers of the tests call: importable by name."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist


def sum_of_ranks(factor: float) -> float:
    """Over all workers, by a collective operation."""
    dist.init_process_group("gloo")
    total = torch.tensor([factor * dist.get_rank()])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total) + dist.is_initialized()


def rank_and_restarts() -> tuple[int, int]:
    """Rank 1 fails once."""
    rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if rank == 1 and restarts == 0:
        raise ValueError("the first attempt")
    return rank, restarts


def fail(how: str) -> None:
    """In rank 1; the other one waits."""
    if os.environ["RANK"] != "1":
        signal.pause()
    if how == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError(f"an error of the test: {how}")
