"""The clock leases are held by."""

from __future__ import annotations

import time


def boottime_s() -> float:
    """Seconds of CLOCK_BOOTTIME: it goes on while the machine sleeps, and nobody can set it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
