"""Periodic work of the agent's loop, coalesced: what has the same period wakes the process at the same moment.

Waking an idle process costs more than what most of these timers do, and many agents may share a machine.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


def call_periodically(
    period_s: float, callback: Callable[..., object], *args: object, offset_s: float = 0.0
) -> asyncio.TimerHandle:
    """Call once, at the next multiple of the period by the loop's clock that is at least half a period away.

    A callback that schedules itself again in this way is called exactly each ``period_s``, together with all others
    of that period.

    Args:
        period_s: seconds.
        callback: what to call.
        args: its arguments.
        offset_s: how long after the multiple, for what reads the results of the others.
    """
    loop = asyncio.get_running_loop()
    moment_s = math.ceil((loop.time() - offset_s) / period_s + 0.5) * period_s
    return loop.call_at(moment_s + offset_s, callback, *args)
