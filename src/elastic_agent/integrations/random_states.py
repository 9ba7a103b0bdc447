"""The states of random number generators, of all ranks of a world."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from elastic_agent.integrations.trainings import gathered


def random_states() -> list[dict[str, Any]]:
    """Return the states of the random number generators of all ranks, in order. A collective."""
    mine: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        mine["numpy"] = (kind, keys.tolist(), *rest)
    cuda: Any = torch.cuda
    if cuda.is_available() and cuda.is_initialized():
        mine["cuda"] = cuda.get_rng_state()
    return gathered(mine)


def restore_random_state(states: list[dict[str, Any]], rank: int, world_size: int) -> None:
    """Continue this rank's sequence of random numbers, if there is one and the world has the same size."""
    if len(states) != world_size:
        return
    mine = states[rank]
    random.setstate(mine["python"])
    torch.set_rng_state(mine["torch"])
    if "numpy" in mine and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(mine["numpy"])
    if "cuda" in mine and torch.cuda.is_available():
        torch.cuda.set_rng_state(mine["cuda"])
