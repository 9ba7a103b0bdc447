"""Shows that torch is being imported, while the agent waits for that and has no event loop yet."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from elastic_agent.logs import waiting_reporter

PATIENCE_S = 5.0
"""A shorter import is not reported."""


@contextlib.contextmanager
def telling_of_import() -> Iterator[Callable[[], None]]:
    """Give what is to be called about once a second while another process imports torch.

    The live line is removed when the wait is over: workers, and packages that the spawner imports after torch, write to
    the same terminal.
    """
    reporter = waiting_reporter()
    began_s = time.monotonic()

    def tick() -> None:
        waited_s = time.monotonic() - began_s
        if waited_s >= PATIENCE_S:
            slow = "the first time on a machine, or from a file server, it may take minutes"
            reporter.update(f"importing torch with {sys.executable}: {slow}", already_s=waited_s)

    try:
        yield tick
    finally:
        reporter.clear()
