"""What the coordinator of a c10d store reads and writes, beginning with the hints that nodes leave for it."""

from __future__ import annotations

from collections.abc import Collection

from elastic_agent.transport.coordinator_records import CoordinatorRecords
from elastic_agent.transport.keys import LifeKeys, RunKeys, name_in
from elastic_agent.transport.records import begun_runs, life_of

from .table import C10dTable

MAX_HINTS = 4096
"""So many hints are taken at once; the rest is taken the next time."""
KEPT_RUNS = 8
"""Of so many ended runs the reports are kept: nodes read them when the run's other records are gone already."""


class C10dInbox:
    """Hints for the coordinator, and the records of all runs of the store."""

    def __init__(self, waiting: C10dTable, requests: C10dTable) -> None:
        """``waiting``: a connection that the wait for hints occupies; ``requests``: one for everything else, as a run
        that is only a name must cost nothing.
        """
        self._waiting = waiting
        self._requests = requests
        self._ended: dict[str, None] = {}
        """Runs that were removed but for their reports."""

    async def wait(self, timeout_s: float) -> list[tuple[str, str]]:
        """Wait until a hint comes; all that are there, as (run id, incarnation). Empty at the time-out.

        Raises:
            StoreLostError: the store is gone.
        """
        items = await self._waiting.take_hints(timeout_s, MAX_HINTS)
        return [hint for item in dict.fromkeys(items) if (hint := _hint_in(item)) is not None]

    def close(self) -> None:
        """Close its connections; a wait raises StoreLostError."""
        self._waiting.close()
        self._requests.close()

    async def runs(self) -> Collection[str]:
        """Return every run that has begun here."""
        return await begun_runs(self._requests)

    async def records(self, run_id: str) -> CoordinatorRecords | None:
        """Return the coordinator's records of one run; None if it has none."""
        run = RunKeys(run_id)
        life = await life_of(self._requests, run)
        return CoordinatorRecords(self._requests, LifeKeys(run, life)) if life is not None else None

    async def ended(self, run_id: str) -> None:
        """Keep the reports of a run that was removed, and remove those of the oldest such runs."""
        self._ended.pop(run_id, None)
        self._ended[run_id] = None
        while len(self._ended) > KEPT_RUNS:
            oldest = RunKeys(next(iter(self._ended)))
            del self._ended[oldest.run_id]
            if await life_of(self._requests, oldest) is None:
                await self._requests.delete((), oldest.folder)


def _hint_in(item: bytes) -> tuple[str, str] | None:
    """Return the run and the incarnation; None if it is no hint of ours."""
    run_id, _, incarnation = item[:512].partition(b" ")
    names = name_in(run_id), name_in(incarnation)
    return (names[0], names[1]) if names[0] is not None and names[1] is not None else None
