"""Coordinates all runs of a store, in a thread of the process that hosts it.

The thread waits for hints in the store's inbox. It resumes the driver of each run that has hints or is due, and
performs the effects that the driver yields.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from elastic_agent.logs import get_logger
from elastic_agent.protocol import Plan
from elastic_agent.rendezvous.coordinator_driver import IDLE_S, KEEP_OVER_S, RunDriver
from elastic_agent.rendezvous.coordinator_effects import LEAST_WAIT_S, WaitForHints, performer
from elastic_agent.rendezvous.effects import Effect, Steps, back_offs, run_until
from elastic_agent.rendezvous.run_history import RunHistoryStore
from elastic_agent.transport import CoordinatorRecords, StoreLostError, drive

RUNS_READ_EVERY_S = 5.0
"""How often the list of runs is read, for runs without a hint."""

MAX_RUNS = 1000
"""How many runs of a store are coordinated at a time."""

RETRY_MIN_S, RETRY_MAX_S = 1.0, 60.0
"""How long a run is left alone after an internal error with it."""


class Inbox(Protocol):
    """Where nodes leave hints."""

    def wait(self, timeout_s: float) -> list[tuple[str, str]]:
        """Hints as (run id, incarnation); empty at the time-out."""

    def runs(self) -> Collection[str]:
        """Every run that has begun here."""

    def ended(self, run_id: str) -> None:
        """Take note that the records of a run were removed."""


class CoordinatorThread(threading.Thread):
    """Runs the drivers of all runs of a store. Ends when it is stopped, or when the store is closed."""

    def __init__(
        self,
        inbox: Inbox,
        open_records: Callable[[str], Coroutine[Any, Any, CoordinatorRecords | None]],
        history_store: RunHistoryStore,
        on_change: Callable[[], None] = lambda: None,
        *,
        on_plan: Callable[[str, Plan], None] = lambda run_id, plan: None,
        on_turn: Callable[[], None] = lambda: None,
        keep_over_s: float = KEEP_OVER_S,
        idle_s: float = IDLE_S,
        compares: bool = True,
    ) -> None:
        """Prepare; ``start()`` begins.

        Args:
            inbox: where nodes leave hints.
            open_records: opens the coordinator's records of a run; None if it has none.
            history_store: the run histories on this machine's disk.
            on_change: called (in this thread) whenever ``busy_with`` changed, and at the end.
            on_plan: called (in this thread) with the newest plan of each run, when it has changed.
            on_turn: called (in this thread) at each turn, as a sign of life.
            keep_over_s: how long a run that is over stays in the store when no node of it is left.
            idle_s: it turns at least this often.
            compares: whether to warn of nodes whose software or settings differ.
        """
        super().__init__(name="elastic-coordinator", daemon=True)
        self._inbox = inbox
        self._runs_read_s = -math.inf
        """When to read the list of runs."""
        self._open_records = open_records
        self._history_store = history_store
        self._on_change = on_change
        self._on_plan = on_plan
        self._on_turn = on_turn
        self._keep_over_s = keep_over_s
        self._idle_s = idle_s
        self._compares = compares
        self._coordinated: dict[str, _Coordinated] = {}
        self._resting: dict[str, _Rest] = {}
        """Runs whose driver failed, and when to start another one."""
        self._is_full = False
        """Whether runs wait until one of those that are coordinated is over."""
        self._stopping = threading.Event()
        self._log = get_logger()
        self.failed = False
        """Whether it ended without having been stopped: the store must be closed."""
        self.busy_with: list[str] = []
        """Runs that still depend on the store."""

    def stop(self) -> None:
        """Have the thread end at its next turn."""
        self._stopping.set()

    def run(self) -> None:
        """Until stopped, or until the store is gone."""
        try:
            self._serve()
        except StoreLostError as error:
            if not self._stopping.is_set():
                self._log.error("the coordinator lost its own store", error=str(error))
        except Exception:
            self._log.exception("internal error of the coordinator; closing the store")
        self.failed = not self._stopping.is_set()
        self.busy_with = []
        self._on_change()

    def _serve(self) -> None:
        hints: list[tuple[str, str]] = []
        while not self._stopping.is_set():
            self._turn(hints)
            self._on_turn()
            now_s = time.monotonic()
            moments = [run.until_s for run in self._coordinated.values()]
            moments += [rest.until_s for rest in self._resting.values()]
            if self._runs_read_s == -math.inf:  # a place has become free
                moments.append(now_s)
            hints = self._inbox.wait(max(LEAST_WAIT_S, min([*moments, now_s + self._idle_s]) - now_s))

    def _turn(self, hints: list[tuple[str, str]]) -> None:
        now_s = time.monotonic()
        by_run: dict[str, set[str]] = {run_id: set() for run_id in (*self._coordinated, *self._resting)}
        for run_id, incarnation in hints:
            if run_id in by_run:
                by_run[run_id].add(incarnation)
            else:
                self._runs_read_s = now_s  # it has begun, or is only a name
        if now_s >= self._runs_read_s:  # now and then without a hint, too: it may have been lost
            by_run |= {run_id: set() for run_id in self._inbox.runs() if run_id not in by_run}
            self._runs_read_s = now_s + RUNS_READ_EVERY_S
        for run_id, incarnations in by_run.items():
            self._turn_run(run_id, incarnations)
        busy = sorted(
            {run_id for run_id, run in self._coordinated.items() if run.driver.needed} | {*self._resting}
        )
        if busy != self.busy_with:
            self.busy_with = busy
            self._on_change()

    def _turn_run(self, run_id: str, incarnations: Collection[str]) -> None:
        """Resume one run's driver, if it is due. What goes wrong with one run is not to end the others."""
        now_s = time.monotonic()
        rest = self._resting.get(run_id) or _Rest()
        # Each run may take a time-out when the store is closed.
        if now_s < rest.until_s or self._stopping.is_set():
            return
        try:
            run = self._coordinated.get(run_id)
            if run is None:
                self._take_up(run_id)
            elif incarnations or run.until_s <= now_s:
                self._resume(run, incarnations)
            self._resting.pop(run_id, None)
        except Exception as error:
            if self._stopping.is_set():
                return
            self._coordinated.pop(run_id, None)  # the next driver begins with the content of the store
            self._resting[run_id] = rest
            pause_s = next(rest.pauses_s)
            rest.until_s = now_s + pause_s
            # If the store is lost, reading the inbox fails.
            trace = None if isinstance(error, StoreLostError) else error
            self._log.error(
                f"error in the coordinator; retrying in {pause_s:g} s",
                run=run_id,
                error=str(error),
                exc_info=trace,
            )

    def _take_up(self, run_id: str) -> None:
        """Coordinate a run from now on."""
        records = drive(self._open_records(run_id))
        if records is None:
            return
        if len(self._coordinated) >= MAX_RUNS:
            if not self._is_full:
                self._log.error(
                    f"this store already coordinates {MAX_RUNS} runs, the maximum; other runs wait until "
                    "one of them ends",
                    run=run_id,
                )
            self._is_full = True
            return
        log = get_logger(run=run_id)
        driver = RunDriver(
            time.monotonic, log, keep_over_s=self._keep_over_s, idle_s=self._idle_s, compares=self._compares
        )
        perform = performer(run_id, records, self._history_store)
        run = self._coordinated[run_id] = _Coordinated(run_id, driver, driver.coordinate(), perform)
        self._resume(run, None)

    def _resume(self, run: _Coordinated, hints: Collection[str] | None) -> None:
        """Run the driver until it waits for hints again, or until the run is removed; None: it is a new one."""
        waiting = run_until(WaitForHints, run.steps, run.perform, hints)
        plan = run.driver.plan
        if plan is not None and plan is not run.shown:
            run.shown = plan
            self._on_plan(run.run_id, plan)
        if waiting is not None:
            run.until_s = waiting.until_s
        else:
            self._removed(run.run_id)

    def _removed(self, run_id: str) -> None:
        """The store holds nothing of this run any more."""
        del self._coordinated[run_id]
        self._inbox.ended(run_id)
        if self._is_full:
            self._is_full, self._runs_read_s = False, -math.inf
        self._log.debug("removed the records of a run that has ended", run=run_id)


@dataclass
class _Coordinated:
    """A run that is coordinated."""

    run_id: str
    driver: RunDriver
    steps: Steps[None]
    """The driver, under way."""
    perform: Callable[[Effect[Any]], Any]
    until_s: float = -math.inf
    """Until when the driver waits for hints."""
    shown: Plan | None = None
    """The newest plan that ``on_plan`` was called with."""


@dataclass
class _Rest:
    """A run that is left alone for a while."""

    until_s: float = -math.inf
    pauses_s: Iterator[float] = field(default_factory=lambda: back_offs(RETRY_MIN_S, RETRY_MAX_S))
