"""Waiting for what a test caused. The limit is a guard against hangs, no statement about speed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

GUARD_S = 300.0
POLL_S = 0.01


def wait_for(what: str, look: Callable[[], T | None]) -> T:
    """Return the first result of ``look`` that is true; ``what``: what is awaited, for the error."""
    ends_s = time.monotonic() + GUARD_S
    while not (found := look()):
        if time.monotonic() > ends_s:
            raise AssertionError(f"waited {GUARD_S:g} s in vain for {what}")
        time.sleep(POLL_S)
    return found


async def wait_for_async(what: str, look: Callable[[], T | None]) -> T:
    """Do the same while the event loop runs on."""
    ends_s = time.monotonic() + GUARD_S
    while not (found := look()):
        if time.monotonic() > ends_s:
            raise AssertionError(f"waited {GUARD_S:g} s in vain for {what}")
        await asyncio.sleep(POLL_S)
    return found
