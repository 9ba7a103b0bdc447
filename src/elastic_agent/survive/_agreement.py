"""Gives all ranks the newest state that one of them has."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_agent.survive._copies import say
from elastic_agent.survive._memory import Memory
from elastic_agent.survive._packing import pack, unpack
from elastic_agent.survive._state import State

_CHUNK_BYTES = 1 << 28


class Choice(NamedTuple):
    """The state that all ranks begin with."""

    step: int
    is_from_memory: bool
    holders: list[bool]
    """For each rank, whether it has this state."""


def choose(script: list[int], memory: list[int]) -> Choice:
    """Return the newest of the ranks' states; the script's own (its checkpoint) if that is as new as one in memory.

    Args:
        script: the step of each rank's script.
        memory: the step of each rank's newest copy; -1: it has none.
    """
    if max(memory) > max(script):
        return Choice(max(memory), True, [step == max(memory) for step in memory])
    return Choice(max(script), False, [step == max(script) for step in script])


def begin(state: State, memory: Memory | None, layout: bytes, size: int, group: Any = None) -> None:
    """Give each of ``size`` ranks the newest state that one of them has; all of them call it.

    Args:
        state: receives it.
        memory: of this rank; None: it has none.
        layout: of the state, the same on all ranks.
        size: 1 needs no group.
        group: a process group for the CPU; None: the default one.

    Raises:
        RuntimeError: the states of two ranks do not have the same layout.
    """
    newest = None if memory is None else memory.newest()
    own = torch.tensor([state.step, -1 if newest is None else newest.step, *layout], device="cpu")
    choice = choose(*_exchange(own, size, group))
    rank = 0 if size == 1 else dist.get_rank(group)
    source = choice.holders.index(True)
    if not all(choice.holders) and rank != source:
        state.restore(unpack(*receive(memory, choice.step, source, group)))
    elif memory is not None and newest is not None and choice.is_from_memory:
        stored = memory.view(newest)
        if not all(choice.holders):
            send(stored, newest.skeleton_size, source, group)
        state.restore(unpack(stored, newest.skeleton_size))
    else:
        state.restore_checkpoint()
        if not all(choice.holders):
            packed = pack(state.state_dict())
            stored = torch.empty(packed.size, dtype=torch.uint8, device="cpu")
            packed.write_to(stored)
            send(stored, len(packed.skeleton), source, group)
    if rank == 0 and choice.is_from_memory:
        say(f"resumed at step {choice.step} from the memory of {sum(choice.holders)} of {size} workers")


def _exchange(own: Tensor, size: int, group: Any) -> tuple[list[int], list[int]]:
    """Return the steps that all ranks have, in their scripts and in memory."""
    ranks = [torch.empty_like(own) for _ in range(size)]
    if size > 1:
        dist.all_gather(ranks, own, group=group)
    else:
        ranks = [own]
    for rank, row in enumerate(ranks):
        if not torch.equal(row[2:], ranks[0][2:]):
            raise RuntimeError(
                f"survive.train: the state of rank {rank} has other parts, shapes or types than that of rank 0; "
                "expected the same on all ranks (a sharded model needs torch.distributed.checkpoint)"
            )
    return [int(row[0]) for row in ranks], [int(row[1]) for row in ranks]


def send(stored: Tensor, skeleton_size: int, source: int, group: Any) -> None:
    """Send a packed state from rank ``source`` to all others of a process group for the CPU."""
    sizes = torch.tensor([len(stored), skeleton_size], device="cpu")
    dist.broadcast(sizes, group_src=source, group=group)
    for chunk in torch.split(stored, _CHUNK_BYTES):
        dist.broadcast(chunk, group_src=source, group=group)


def receive(memory: Memory | None, step: int, source: int, group: Any) -> tuple[Tensor, int]:
    """Receive a packed state; where there is memory for copies, as a copy in it.

    Returns:
        Its bytes, and how many of them are the skeleton.
    """
    sizes = torch.empty(2, dtype=torch.int64, device="cpu")
    dist.broadcast(sizes, group_src=source, group=group)
    size, skeleton_size = sizes.tolist()
    with contextlib.ExitStack() as copying:
        try:
            if memory is None:
                raise MemoryError
            stored = copying.enter_context(memory.replacing(step, size, skeleton_size))
        except (OSError, MemoryError):  # the first copy will say why
            stored = torch.empty(size, dtype=torch.uint8, device="cpu")
        for chunk in torch.split(stored, _CHUNK_BYTES):
            dist.broadcast(chunk, group_src=source, group=group)
    return stored, skeleton_size
