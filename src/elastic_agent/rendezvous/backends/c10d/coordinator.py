"""Coordinates all runs of a store, in the process that hosts it.

One task takes the hints that nodes leave in the store's inbox; each run's driver is run in a task of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import KW_ONLY, dataclass, field

from elastic_agent.logs import get_logger
from elastic_agent.protocol import Plan
from elastic_agent.rendezvous.coordinator_driver import KEEP_OVER_S, LEAST_WAIT_S, RunDriver
from elastic_agent.rendezvous.run_history import RunHistoryStore
from elastic_agent.rendezvous.waits import Signal, back_offs
from elastic_agent.transport import StoreLostError, TransportError
from elastic_agent.transport.c10d import C10dInbox

RUNS_READ_EVERY_S = 5.0
"""The pause between reads of the list of runs, for runs without a hint."""

READ_PAUSE = 4
"""For so many times as long as that took it is not read again: hints that name no run are to delay none."""

RETRY_MIN_S, RETRY_MAX_S = 1.0, 60.0
"""The time for which a run is left alone after an internal error with it."""


@dataclass(eq=False, repr=False)
class StoreCoordinator:
    """Runs the drivers of all runs of a store."""

    open_inbox: Callable[[], Awaitable[C10dInbox]]
    """Connects to the store."""
    history_store: RunHistoryStore
    """The run histories on this machine's disk."""
    on_change: Callable[[], None] = lambda: None
    """Called whenever ``busy_with`` changed, and when the store was lost."""
    _: KW_ONLY
    on_plan: Callable[[str, Plan], None] = lambda run_id, plan: None
    """Called with the newest plan of each run, when it has changed."""
    keep_over_s: float = KEEP_OVER_S
    """How long a run that is over stays in the store when no node of it is left."""

    def __post_init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = get_logger()
        self.failed = False
        """It ended without having been cancelled: the store must be closed."""
        self.busy_with: list[str] = []
        """Runs that still depend on the store."""

    async def run(self) -> None:
        """Coordinate until cancelled, or until the store is gone."""
        try:
            await self._dispatch()
        except TransportError as error:
            self._log.error("the coordinator lost its own store", error=str(error))
        except Exception:
            self._log.exception("internal error of the coordinator; closing the store")
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self.failed = True
        self.busy_with = []
        self.on_change()

    async def _dispatch(self) -> None:
        """Give each run its hints, and take up those that begin."""
        inbox = await self.open_inbox()
        with contextlib.closing(inbox):
            while True:
                began_s = time.monotonic()
                await self._take_up_runs(inbox)
                read_s = time.monotonic()
                # Now and then without a hint, too: it may have been lost.
                again_s, soonest_s = read_s + RUNS_READ_EVERY_S, read_s + READ_PAUSE * (read_s - began_s)
                while (left_s := again_s - time.monotonic()) > 0:
                    for run_id, incarnation in await inbox.wait(left_s):
                        if run_id in self._runs:
                            self._runs[run_id].hints[incarnation] = None
                            self._runs[run_id].came.set()
                        else:
                            again_s = min(again_s, soonest_s)  # it has begun, or is only a name

    async def _take_up_runs(self, inbox: C10dInbox) -> None:
        """Coordinate every run that has begun from now on."""
        for run_id in await inbox.runs():
            if run_id not in self._runs:
                run = self._runs[run_id] = _Run(run_id)
                task = asyncio.create_task(self._coordinate(run, inbox), name=f"coordinator of {run_id}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _coordinate(self, run: _Run, inbox: C10dInbox) -> None:
        """Coordinate a run until it is over. What goes wrong with one run is not to end the others."""
        while True:
            run.hints.clear()  # all is read now
            run.came.take()
            try:
                await self._drive(run, inbox)
            except Exception as error:
                pause_s = next(run.pauses_s)
                # If the store is lost, reading the inbox fails.
                trace = None if isinstance(error, StoreLostError) else error
                self._log.error(
                    f"error in the coordinator; retrying in {pause_s:g} s",
                    run=run.run_id,
                    error=str(error),
                    exc_info=trace,
                )
                self._is_needed(run, True)
                await asyncio.sleep(pause_s)  # the next driver begins with the content of the store
            else:
                if not run.hints:  # else the next run of that name has begun
                    break
        self._is_needed(run, False)
        del self._runs[run.run_id]

    async def _drive(self, run: _Run, inbox: C10dInbox) -> None:
        """Run a driver until the store holds nothing of the run any more."""
        records = await inbox.records(run.run_id)
        if records is None:
            return
        shown: Plan | None = None

        def show() -> None:
            nonlocal shown
            if driver.plan is not None and driver.plan is not shown:
                shown = driver.plan
                self.on_plan(run.run_id, shown)

        async def wait_for_hints(until_s: float) -> Collection[str]:
            show()
            run.pauses_s = _pauses_s()
            self._is_needed(run, driver.needed)
            await run.came.wait(max(LEAST_WAIT_S, until_s - time.monotonic()))
            hints, run.hints = run.hints, {}
            return hints

        driver = RunDriver(
            run.run_id,
            records,
            self.history_store,
            wait_for_hints,
            time.monotonic,
            get_logger(run=run.run_id),
            keep_over_s=self.keep_over_s,
        )
        await driver.coordinate()
        show()
        await inbox.ended(run.run_id)
        self._log.debug("removed the records of a run that has ended", run=run.run_id)

    def _is_needed(self, run: _Run, is_needed: bool) -> None:
        run.is_needed = is_needed
        busy = sorted(run.run_id for run in self._runs.values() if run.is_needed)
        if busy != self.busy_with:
            self.busy_with = busy
            self.on_change()


def _pauses_s() -> Iterator[float]:
    return back_offs(RETRY_MIN_S, RETRY_MAX_S)


@dataclass
class _Run:
    """A run that is coordinated, or is left alone for a while."""

    run_id: str
    hints: dict[str, None] = field(default_factory=dict)
    """The incarnations whose records changed, until they are taken."""
    came: Signal = field(default_factory=Signal)
    """There are hints."""
    pauses_s: Iterator[float] = field(default_factory=_pauses_s)
    is_needed: bool = False
    """It depends on the store."""


JOIN_S = 1.0
"""The time for which the thread is waited for when it is to end."""


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
