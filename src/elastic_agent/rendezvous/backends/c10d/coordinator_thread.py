"""The coordinator of a store in an agent: it goes on while the agent's own event loop hangs."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from .coordinator import StoreCoordinator

JOIN_S = 1.0
"""How long the thread is waited for when it is to end."""


class CoordinatorThread:
    """Runs a coordinator in an event loop and a thread of its own.

    An agent whose loop hangs (its terminal is stopped, a pipe that takes its log is full) does not renew its lease; the
    nodes of the other machines are to go on without it, although this process hosts their store.
    """

    def __init__(self, coordinator: StoreCoordinator) -> None:
        """Begin."""
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(coordinator.run(), name="coordinator")
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End; waits for a moment at most."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended by itself
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._task)
            self._loop.run_until_complete(asyncio.sleep(0))  # connections that were closed end
        finally:
            self._loop.close()
