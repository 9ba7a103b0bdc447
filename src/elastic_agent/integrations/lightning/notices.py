"""Agreement on a notice, at steps of any duration."""

from __future__ import annotations

import time
from typing import Any

from elastic_agent import client
from elastic_agent.integrations.trainings import from_rank_0

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
        """Return the notice that all ranks know of, or None. Call it once a step, on every rank."""
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


def _group_in_main_memory() -> Any:
    """Return a process group whose collectives do not wait for a GPU; None if the default group is one."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    if "cpu:" in dist.get_backend_config() or dist.get_backend() in ("gloo", "mpi"):
        return None
    return dist.new_group(backend="gloo")
