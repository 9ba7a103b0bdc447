"""Adapts the parts of a checkpoint that depend on the world in which it was saved."""

from __future__ import annotations

import random
import sys
from typing import Any


def translate_batches(counters: dict[str, Any], saved_in: int, world: int) -> None:
    """Have the counters of one worker's batches stand for as much of the epoch in a world of another size.

    In a world of three workers, 20 batches are as many samples as 30 batches of two workers.
    """
    if saved_in == world:
        return
    done = counters["ready"]
    moved = -(-done * saved_in // world) - done  # rounded up: never more than the epoch has
    for name in ("ready", "started", "processed", "completed"):
        counters[name] += moved


def random_states(world_size: int) -> list[dict[str, Any]]:
    """Return the states of the random number generators of all ranks, in order. A collective."""
    import torch
    import torch.distributed as dist

    mine: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        mine["numpy"] = (kind, keys.tolist(), *rest)
    cuda: Any = torch.cuda
    if cuda.is_available() and cuda.is_initialized():
        mine["cuda"] = cuda.get_rng_state()
    if world_size == 1:
        return [mine]
    states: list[Any] = [None] * world_size
    dist.all_gather_object(states, mine)
    return states


def restore_random_state(saved: dict[str, Any], rank: int, world_size: int) -> None:
    """Continue this rank's sequence of random numbers, if the checkpoint has one and the world has the same size."""
    import torch

    states = saved.get("random", [])
    if len(states) != world_size:
        return
    mine = states[rank]
    random.setstate(mine["python"])
    torch.set_rng_state(mine["torch"])
    if "numpy" in mine and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(mine["numpy"])
    if "cuda" in mine and torch.cuda.is_available():
        torch.cuda.set_rng_state(mine["cuda"])
