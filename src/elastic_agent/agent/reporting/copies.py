"""Warns of workers that each train a model of their own, as they take optimizer steps without a process group."""

from __future__ import annotations

from collections.abc import Callable, Set

from elastic_agent.logs import get_logger
from elastic_agent.protocol import Seat, World


class CopiesWarning:
    """Warns once, when every worker of this node has reported it."""

    def __init__(self, world: Callable[[], World | None], seat: Callable[[], Seat | None]) -> None:
        """Prepare; ``world``: whose workers this node runs, and ``seat``: its own in it."""
        self._world = world
        self._seat = seat
        self._is_told = False

    def __call__(self, slots: Set[int]) -> None:
        """Take the slots of the workers that have reported it; none of the others has made a process group."""
        world, seat = self._world(), self._seat()
        if self._is_told or world is None or seat is None or world.world_size == 1 or len(slots) < seat.slots:
            return
        self._is_told = True
        get_logger().warning(
            "every worker of this node takes optimizer steps without a process group: unless the script shares "
            "gradients in another way, each worker trains a model of its own. To train one model with all "
            f"{world.world_size} workers, call torch.distributed.init_process_group() or fabric.launch(), or use "
            "Accelerator, or a Trainer with all devices; if that is intended, ignore this"
        )
