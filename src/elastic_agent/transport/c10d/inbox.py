"""What the coordinator of a c10d store reads and writes, beginning with the hints that nodes leave for it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection

from elastic_agent.transport.coordinator_records import CoordinatorRecords
from elastic_agent.transport.keys import INBOX, LifeKeys, RunKeys, name_in
from elastic_agent.transport.record_reader import ReportInvalid, log_invalid
from elastic_agent.transport.records import begun_runs, life_of

from .table import C10dTable

MAX_HINTS = 4096
"""So many hints are taken at once; the rest is taken the next time."""
KEPT_RUNS = 8
"""Of so many ended runs the reports are kept: nodes read them when the run's other records are gone already."""
RECEIVE_S = 300.0
"""How long one wait for hints takes at most."""


class C10dInbox:
    """Hints for the coordinator, and the records of all runs of the store."""

    def __init__(
        self, waiting: C10dTable, requests: C10dTable, report_invalid: ReportInvalid = log_invalid
    ) -> None:
        """``waiting``: a connection that the wait for hints occupies; ``requests``: one for everything else, as a run
        that is only a name must cost nothing.
        """
        self._waiting = waiting
        self._requests = requests
        self._report_invalid = report_invalid
        self._ended: dict[str, None] = {}
        """Runs that were removed but for their reports."""
        self._reported = False
        self._taking: asyncio.Task[list[bytes]] | None = None
        """Goes on when a wait ends without it, as what it takes is not in the store any more."""

    async def wait(self, timeout_s: float | None) -> list[tuple[str, str]]:
        """Wait until a hint comes; all that are there. Empty at the time-out; None: there is none.

        Raises:
            StoreLostError: the store is gone.
        """
        ends_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if self._taking is None:
                self._taking = asyncio.create_task(self._waiting.take_hints(RECEIVE_S, MAX_HINTS))
                self._taking.add_done_callback(_look_at)
            left_s = ends_s - time.monotonic()
            await asyncio.wait([self._taking], timeout=None if timeout_s is None else max(0.0, left_s))
            if not self._taking.done():
                return []
            taken, self._taking = self._taking, None
            if items := taken.result():
                return [hint for item in dict.fromkeys(items) if (hint := self._hint(item)) is not None]

    def close(self) -> None:
        """Close its connections; a wait raises StoreLostError."""
        self._waiting.close()
        self._requests.close()

    def _hint(self, item: bytes) -> tuple[str, str] | None:
        run_id, _, incarnation = item[:512].partition(b" ")
        names = name_in(run_id), name_in(incarnation)
        if names[0] is not None and names[1] is not None:
            return names[0], names[1]
        if not self._reported:  # once is enough: such a writer may write a lot
            self._reported = True
            self._report_invalid(f"{self._requests.root}{INBOX}: {item[:64]!r} is not a hint")
        return None

    async def runs(self) -> Collection[str]:
        """Return every run that has begun here."""
        return await begun_runs(self._requests)

    async def records(self, run_id: str) -> CoordinatorRecords | None:
        """Return the coordinator's records of one run; None if it has none."""
        run = RunKeys(run_id)
        life = await life_of(self._requests, run)
        return CoordinatorRecords(self._requests, LifeKeys(run, life)) if life is not None else None

    async def ended(self, run_id: str) -> None:
        """A run was removed: keep its reports, and remove those of the oldest such runs."""
        self._ended.pop(run_id, None)
        self._ended[run_id] = None
        while len(self._ended) > KEPT_RUNS:
            oldest = RunKeys(next(iter(self._ended)))
            del self._ended[oldest.run_id]
            if await life_of(self._requests, oldest) is None:
                await self._requests.delete((), oldest.folder)


def _look_at(taking: asyncio.Task[list[bytes]]) -> None:
    """Have an error that nobody waits for not logged: the next wait raises it again."""
    if not taking.cancelled():
        taking.exception()
