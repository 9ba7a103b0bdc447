"""The hints that nodes leave for the coordinator of a c10d store."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Collection

from elastic_agent.transport.keys import INBOX, RunKeys, name_in
from elastic_agent.transport.record_reader import ReportInvalid, log_invalid
from elastic_agent.transport.records import begun_runs, life_of
from elastic_agent.transport.table import drive

from .table import C10dTable

MAX_HINTS = 4096
"""So many hints are taken at once; the rest is taken the next time."""
KEPT_RUNS = 8
"""Of so many ended runs the reports are kept: nodes read them when the run's other records are gone already."""
RECEIVE_S = 300.0
"""How long one wait for hints takes at most."""


class _Receiver(threading.Thread):
    """Takes hints from the store as they come.

    Not the coordinator itself, which turns at certain times: each time-out of a wait for the store costs 0.3 ms.
    """

    def __init__(self, table: C10dTable) -> None:
        super().__init__(name="elastic-inbox", daemon=True)
        self._table = table
        self.batches: queue.SimpleQueue[list[bytes] | Exception] = queue.SimpleQueue()
        """What came; at the end, why no more will come."""

    def run(self) -> None:
        """Until the store is gone."""
        try:
            while True:
                if hints := self._table.take_hints(RECEIVE_S, MAX_HINTS):
                    self.batches.put(list(dict.fromkeys(hints)))
        except Exception as error:
            self.batches.put(error)


class C10dInbox:
    """Hints for the coordinator, over all runs of the store."""

    def __init__(
        self, waiting: C10dTable, requests: C10dTable, report_invalid: ReportInvalid = log_invalid
    ) -> None:
        """``waiting``: a connection that a thread occupies; ``requests``: one for everything else."""
        self._receiver = _Receiver(waiting)
        self._requests = requests
        self._report_invalid = report_invalid
        self._ended: dict[str, None] = {}
        """Runs that were removed but for their reports."""
        self._reported = False
        self._lost: Exception | None = None

    def wait(self, timeout_s: float) -> list[tuple[str, str]]:
        """Block until a hint comes; all that are there. Empty at the time-out, or when woken."""
        if self._receiver.ident is None:
            self._receiver.start()
        items: dict[bytes, None] = {}
        with contextlib.suppress(queue.Empty):
            self._take(items, timeout_s)
            while len(items) < MAX_HINTS:
                self._take(items, 0)
        return [hint for item in items if (hint := self._hint(item)) is not None]

    def _take(self, items: dict[bytes, None], timeout_s: float) -> None:
        """One batch; raises ``queue.Empty`` at the time-out."""
        if self._lost is not None:
            raise self._lost
        batch = self._receiver.batches.get(block=timeout_s > 0, timeout=timeout_s)
        if isinstance(batch, Exception):
            self._lost = batch
            raise batch
        items.update(dict.fromkeys(batch))

    def _hint(self, item: bytes) -> tuple[str, str] | None:
        if not item:
            return None  # only to wake us
        run_id, _, incarnation = item[:512].partition(b" ")
        names = name_in(run_id), name_in(incarnation)
        if names[0] is not None and names[1] is not None:
            return names[0], names[1]
        if not self._reported:  # once is enough: such a writer may write a lot
            self._reported = True
            self._report_invalid(f"{self._requests.root}{INBOX}: {item[:64]!r} is not a hint")
        return None

    def runs(self) -> Collection[str]:
        """Return every run that has begun here."""
        return drive(begun_runs(self._requests))

    def ended(self, run_id: str) -> None:
        """A run was removed: keep its reports, and remove those of the oldest such runs."""
        self._ended.pop(run_id, None)
        self._ended[run_id] = None
        while len(self._ended) > KEPT_RUNS:
            oldest = RunKeys(next(iter(self._ended)))
            del self._ended[oldest.run_id]
            if drive(life_of(self._requests, oldest)) is None:
                drive(self._requests.delete((), oldest.folder))

    def wake(self) -> None:
        """Wake the waiting thread (from another one)."""
        self._receiver.batches.put([])
