"""The reports that the nodes of a run exchange over a store, and what else it holds for people who ask."""

from __future__ import annotations

from collections.abc import Callable, Collection

from elastic_agent.protocol import Phase

from .base import RunView, Snapshot
from .coordinator_records import CoordinatorRecords
from .keys import LifeKeys, RunKeys
from .plans import PlanReader
from .records import begun_runs, life_of, status_in
from .table import Table

MOST_OTHER_RUNS = 20
"""So many other runs are looked at."""


class _Life:
    """Readers of one life of a run's records."""

    def __init__(self, table: Table, keys: LifeKeys) -> None:
        self.keys = keys
        self.plans = PlanReader(table, keys, _ignore)
        self.records = CoordinatorRecords(table, keys, _ignore)

    @classmethod
    async def of(cls, table: Table, run: RunKeys) -> _Life | None:
        life = await life_of(table, run)
        return cls(table, LifeKeys(run, life)) if life is not None else None


def _ignore(problem: str) -> None:
    """Ignore what is invalid: the coordinator reports it."""


class ReportRecords:
    """A connection to the reports of one run. Every call raises :class:`StoreLostError` when the store is gone."""

    def __init__(self, table: Table, run_id: str) -> None:
        """``table``: closed with the records."""
        self._table = table
        self._run = RunKeys(run_id)
        self._life: _Life | None = None
        """What was read last, of which most has not changed the next time."""

    async def write_report(self, node_id: str, data: bytes) -> None:
        """Replace the node's reports. A write that arrives late may replace a newer one."""
        await self._table.put(self._run.reports + node_id, data)

    async def read_run(self) -> RunView:
        """Read all that the store holds about the run."""
        found = await self._table.read_folders(self._run.reports)
        reports = {key.removeprefix(self._run.reports): data for key, data in found.items()}
        life = await _Life.of(self._table, self._run)
        if life is None:
            return RunView(reports=reports)
        if self._life is None or self._life.keys.life != life.keys.life:
            self._life = life
        plan, snapshot = await self._life.plans.newest(), await self._life.records.read(None)
        return RunView(plan, await status_in(self._table, life.keys), snapshot, reports)

    async def read_waiting_runs(self) -> dict[str, Snapshot]:
        """Read other runs that wait at this endpoint for nodes and have never had enough, by id; a few at most.

        Empty where many runs that have nothing to do with each other share a store by design.
        """
        if self._table.is_shared:
            return {}
        found: dict[str, Snapshot] = {}
        others = [run_id for run_id in await begun_runs(self._table) if run_id != self._run.run_id]
        for run_id in others[:MOST_OTHER_RUNS]:
            life = await _Life.of(self._table, RunKeys(run_id))
            plan = await life.plans.newest() if life is not None else None
            if life is not None and plan is not None and plan.phase is Phase.FORMING and plan.world is None:
                found[run_id] = await life.records.read(None)
        return found

    async def read_notes(self, names: Collection[str]) -> dict[str, bytes]:
        """Return the notes of these names that are there: what users ask, and what nodes answer."""
        found = await self._table.read([self._run.folder + name for name in names])
        return {key.removeprefix(self._run.folder): data for key, data in found.items()}

    async def write_note(self, name: str, data: bytes, lasts_s: float) -> None:
        """Write a note; after ``lasts_s`` seconds the store may remove it, so its name must not be used again."""
        await self._table.put(self._run.folder + name, data, lasts_s)

    async def change_note(self, name: str, change: Callable[[bytes | None], bytes]) -> None:
        """Replace a note by what ``change`` makes of it, also while others do so."""
        key, stored = self._run.folder + name, (await self.read_notes([name])).get(name)
        while (found := await self._table.swap(key, stored, change(stored))) != change(stored):
            stored = found

    async def remove_notes(self, names: Collection[str]) -> None:
        """Remove the notes of these names."""
        await self._table.delete([self._run.folder + name for name in names])

    def close(self) -> None:
        """Close the connection; never blocks."""
        self._table.close()
