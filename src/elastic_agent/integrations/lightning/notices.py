"""Agreement on a notice, at steps of any duration."""

from __future__ import annotations

import os
import resource
import time
from typing import Any

from elastic_agent import client

CONNECT_WHEN_USED = "TORCH_GLOO_LAZY_INIT"
"""Has gloo connect two ranks when they first exchange something, and not all when the group is made."""

PART_OF_OPEN_FILES = 8
"""With more ranks than this part of the files that a process may have open, they connect when they exchange something.
With fewer, nothing is changed in the environment: another thread may be reading it."""

INTERVAL_S = 0.05
"""How often the ranks agree, about. Each time costs them some tenths of a millisecond, which would be much of a short
step; twice as long is little of the time that a notice gives."""

_MEASURED = 10
"""Steps whose duration is measured; the first one is not among them."""


class PacedAgreement:
    """A ``client.Agreement`` that agrees at every n-th step, where n depends on the duration of a step."""

    def __init__(self) -> None:
        self._alone = client.current().placement.world_size == 1
        self._group = _group_in_main_memory()
        self._agreement = client.Agreement(self._group)
        self._steps = 0
        self._began_s = 0.0

    def notice(self) -> client.Notice | None:
        """The notice that all ranks know of, or None. Call it once a step, on every rank."""
        self._steps += 1
        if self._alone:
            return self._agreement.notice()
        if self._steps == 1:
            self._began_s = time.monotonic()
        elif self._steps == 1 + _MEASURED:
            step_s = (time.monotonic() - self._began_s) / _MEASURED
            every = from_rank_0(max(1, int(INTERVAL_S / max(step_s, 1e-4))), self._group)
            self._agreement = client.Agreement(self._group, every=every)
        return self._agreement.notice()


def from_rank_0(value: Any, group: Any = None) -> Any:
    """Rank 0's value: clocks differ, and all ranks have to do the same."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, group=group)
    return values[0]


def _group_in_main_memory() -> Any:
    """A process group whose collectives do not wait for a GPU; None if the default group is one."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    if "cpu:" in dist.get_backend_config() or dist.get_backend() in ("gloo", "mpi"):
        return None
    # Else each rank would connect to every other one now, though the agreement needs a few of these connections: near
    # 1,000 ranks, the usual limit of open files. torch reads it from here only, and gloo does it over plain TCP only.
    is_plain = os.environ.get("GLOO_DEVICE_TRANSPORT", "TCP") == "TCP"
    are_many = dist.get_world_size() > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // PART_OF_OPEN_FILES
    if CONNECT_WHEN_USED in os.environ or not (is_plain and are_many):
        return dist.new_group(backend="gloo")
    os.environ[CONNECT_WHEN_USED] = "1"
    try:
        return dist.new_group(backend="gloo")
    finally:
        del os.environ[CONNECT_WHEN_USED]
