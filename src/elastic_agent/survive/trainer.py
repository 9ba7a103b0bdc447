"""Copies of a framework's training, in memory that the agent holds: with ``--survive memory`` or ``keep``.

All ranks make a copy at the same steps, with what the framework itself writes into a checkpoint. Workers that are
started again continue with the newest copy that one of them has.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from elastic_agent import client
from elastic_agent.survive._agreement import receive, send
from elastic_agent.survive._copies import say
from elastic_agent.survive._memory import Copy, Memory
from elastic_agent.survive._packing import map_tensors, pack, unpack

_LEAST_S = 1.0
"""Between two copies."""
_SHARE = 0.02
"""Of the time of training, which copies may take."""
_MEASURED = 10
"""Steps whose duration is measured."""


class TrainingCopies:
    """The copies of one training, on every rank."""

    def __init__(self, training_id: str) -> None:
        """Find those that are there. ``training_id``: the same for a training that continues, and on all ranks."""
        self._memory: Memory | None = None
        self._steps = 0
        self._since = (0, 0.0)
        """A number of steps, and when so many were done: the time that one takes is measured from there."""
        self._seen: int | None = None
        """The step that was looked at last."""
        self._due: int | None = None
        """After so many steps of this process a copy is due; None: it is not known yet how long they take, or no rank
        can make any."""
        try:
            identity = hashlib.sha256(f"trainer/{training_id}".encode()).digest()
            placement = client.current().placement
            self._memory = Memory.of_worker(identity, placement.local_world_size)
            if self._memory is not None and self._memory.belongs_to_another():
                if placement.local_rank == 0:
                    say(
                        "copies in memory are not used: they are not of this training, or it names a checkpoint"
                    )
                self._memory.clear()
        except OSError as error:
            self._stop(error)

    def newest(self, than: int) -> dict[str, Any] | None:
        """Return the newest copy that a rank has, if it is of a later step; all ranks call it, with the same step.

        A copy is not returned again when the budget was charged for a failure of the training with it: then the
        training continues with its checkpoint.
        """
        own = self._memory.newest() if self._memory is not None else None
        restarts = client.current().placement.restarts
        if own is not None and own.used not in (-1, restarts):
            own = None
        steps = _gathered(-1 if own is None else own.step)
        if max(steps) <= than:
            return None
        holders = [step == max(steps) for step in steps]
        if not dist.is_initialized() or dist.get_rank() == 0:
            count = f"{sum(holders)} of {len(holders)} workers"
            say(f"training continues after step {max(steps)}, from the memory of {count}")
        stored, skeleton_size = self._from_holder(own, holders, max(steps))
        if self._memory is not None and (used := self._memory.newest()) is not None:
            self._memory.use(used, restarts)
        # What is loaded may be kept, and the memory is written again.
        tree: dict[str, Any] = map_tensors(unpack(stored, skeleton_size, trusted=True), torch.clone)
        return tree

    def _from_holder(self, own: Copy | None, holders: list[bool], step: int) -> tuple[torch.Tensor, int]:
        """Return the bytes of the newest copy, and how many of them are the skeleton."""
        is_holder = own is not None and own.step == step
        if all(holders):
            assert self._memory is not None
            assert own is not None
            return self._memory.view(own), own.skeleton_size
        source, group = holders.index(True), dist.new_group(backend="gloo")
        try:
            if dist.get_rank() != source:
                return receive(None if is_holder else self._memory, step, source, group)
            assert self._memory is not None
            assert own is not None
            send(self._memory.view(own), own.skeleton_size, source, group)
            return self._memory.view(own), own.skeleton_size
        finally:
            dist.destroy_process_group(group)

    def is_due(self, step: int) -> bool:
        """Return whether to make a copy after this step, the same on all ranks; to be called after each step."""
        if step == self._seen:
            return False
        self._seen = step
        self._steps += 1
        if self._steps == 1:
            self._since = self._steps, time.monotonic()
        elif self._steps == 1 + _MEASURED:
            self._due = self._steps + _gathered(max(1, round(_LEAST_S / self._step_s())))[0]
        return self._due is not None and self._steps >= self._due

    def _step_s(self) -> float:
        steps, began_s = self._since
        return max((time.monotonic() - began_s) / (self._steps - steps), 1e-6)

    def make(self, step: int, tree: Callable[[], dict[str, Any]]) -> None:
        """Copy the state after a step; a failure ends the copies of this rank with a line.

        Args:
            step: its number.
            tree: returns the state. All ranks call it, as it may communicate.
        """
        step_s, start_s = self._step_s(), time.monotonic()
        try:
            state = tree()
            if self._memory is not None:
                self._memory.write(step, pack(state))
        except Exception as error:
            self._stop(error)
        took_s = time.monotonic() - start_s
        every = max(1, round(max(_LEAST_S, took_s / _SHARE) / step_s))
        told = _gathered(every if self._memory is not None else 0)
        self._due = self._steps + max(told) if any(told) else None
        self._since = self._steps, time.monotonic()

    def end(self) -> None:
        """Forget the copies, as the training is complete."""
        if self._memory is not None:
            self._memory.clear()
            self._memory = None

    def _stop(self, error: Exception) -> None:
        self._memory = None
        seen = (str(error).splitlines() or [type(error).__name__])[0]
        say(f"no copies of the training in memory: {seen}")


def _gathered(value: int) -> list[int]:
    """Return the values of all ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values = [0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
