"""Implements :class:`elastic_agent.client.Agreement`; torch is imported only when one is used."""

from __future__ import annotations

import os

from elastic_agent.client._notice import CAUSES, Notice, NoticeBoard
from elastic_agent.worker_variables import GENERATION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Agreement:
    """Delivers a notice to all ranks of a process group at the same step.

        agreement = client.Agreement()
        for step in range(first_step, last_step):
            train(step)
            if agreement.notice():
                save(step)
                client.leave()

    Workers get a notice within milliseconds of each other, but not at the same step; one that left a step before the
    others would leave them in a collective that never ends. So every call takes part in a small all-reduce, which
    runs beside the next step: what a call returns was agreed while that step ran, and is the same on every rank.
    """

    def __init__(self, group: Any = None, *, every: int = 1) -> None:
        """Take part from now on; every rank of the group has to.

        Args:
            group: the torch process group whose ranks stop together; None: the default group. Without
                ``torch.distributed`` being initialised this worker is alone and agrees with itself.
            every: agree only at every n-th call, for steps shorter than a millisecond.

        Raises:
            ValueError: ``every`` is less than 1.
        """
        if every < 1:
            raise ValueError(f"Agreement: every={every!r}; expected a whole number of at least 1")
        self._group = group
        self._every = every
        self._calls = 0
        self._under_way: tuple[Any, Any] | None = None
        self._agreed: Notice | None = None
        self._generation = os.environ.get(GENERATION)

    def notice(self) -> Notice | None:
        """Return the notice that all ranks know of, or None. Call it once a step, on every rank of the group.

        One that this worker has had is returned at the next call at the earliest. Once there is one it stays,
        and the ranks exchange nothing more.
        """
        generation = os.environ.get(GENERATION)
        if (
            generation != self._generation
        ):  # this worker has gone on in another world, with another process group
            self._generation, self._calls, self._under_way, self._agreed = generation, 0, None, None
        self._calls += 1
        if self._calls % self._every:
            return self._agreed
        board = _board()
        serial, newest = board.numbered()
        if not self._together():
            self._agreed = newest
            return newest
        self._collect(board, serial, newest)
        if self._agreed is None:  # an all-reduce under way could end this process while it leaves
            self._start(serial, newest)
        return self._agreed

    def _together(self) -> bool:
        import torch.distributed as dist

        return dist.is_available() and dist.is_initialized() and dist.get_world_size(self._group) > 1

    def _collect(self, board: NoticeBoard, serial: int, newest: Notice | None) -> None:
        """Take in what was agreed since the last call."""
        if self._under_way is None:
            return
        numbers, work = self._under_way
        self._under_way = None
        work.wait()
        packed, left_ms = numbers.tolist()
        agreed, cause = divmod(packed, 8)
        if not agreed:
            return
        board.agreed(agreed)
        if newest is not None and serial == agreed:
            self._agreed = newest
        else:  # the agent of another rank was quicker than ours
            self._agreed = Notice.due(CAUSES[cause - 1], left_ms / 1000)

    def _start(self, serial: int, newest: Notice | None) -> None:
        """Send the others the notice that is known here; runs in parallel to the next step."""
        import torch
        import torch.distributed as dist

        packed = 0 if newest is None else serial * 8 + CAUSES.index(newest.reason) + 1
        left_ms = 0 if newest is None else int(newest.seconds_left * 1000)
        numbers = torch.tensor([packed, left_ms], dtype=torch.int64, device=self._device())
        work = dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._under_way = numbers, work

    def _device(self) -> str:
        """Return where the group can reduce: in main memory if it has a backend for that, so that no GPU is
        waited for."""
        import torch
        import torch.distributed as dist

        backends = dist.get_backend_config(self._group)
        if "cpu:" in backends or dist.get_backend(self._group) in ("gloo", "mpi"):
            return "cpu"
        accelerator = torch.accelerator.current_accelerator()
        return "cpu" if accelerator is None else accelerator.type


def _board() -> NoticeBoard:
    from elastic_agent import client

    return client._board
