"""The coordinator's records of one run in a store; and the reports, on which no decision depends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from elastic_agent.protocol import MAX_WAITING_CHARS, Lease, Phase, Plan, RecordError, decode, encode

from .base import RunView, Snapshot, Table
from .keys import CLEARING, GONE, JOBS, RELEASED, LifeKeys, RunKeys
from .record_reader import Plans, RecordReader, ReportInvalid, log_invalid
from .records import begun_runs, life_of, status_in

FORGOTTEN_S = 3600.0
"""For how long at least no forgotten incarnation can be written again."""

ENDED_S = 30 * 24 * 3600.0
"""For how long at least the generation of an ended run is kept, so that the next run of its name goes above it."""


@dataclass(eq=False, repr=False)
class CoordinatorRecords:
    """The coordinator's connection to one life of a run's records; it alone writes plans.

    Every call raises :class:`StoreLostError` when the store is gone.
    """

    table: Table
    """The connection, which the records of other runs may share."""
    keys: LifeKeys
    """Of this life of the records."""
    report_invalid: ReportInvalid = log_invalid
    """Called once with a description of each invalid record in the store."""

    def __post_init__(self) -> None:
        self._plans = Plans(self.table, self.keys, self.report_invalid)
        self._records = RecordReader(self.table.root + self.keys.folder, self.report_invalid)

    async def read(self, incarnations: Collection[str] | None) -> Snapshot:
        """Read member and lease records of these incarnations, or of all (None)."""
        keys = self.keys
        if incarnations is None:
            found = await self.table.read_folders(keys.members, keys.leases)
        else:
            found = await self.table.read(
                [key for name in incarnations for key in (keys.member(name), keys.lease(name))]
            )
        read = {name: self._records.member(name, data) for name, data in _under(keys.members, found).items()}
        members = {name: member for name, member in read.items() if member is not None}
        leases = self._records.leases(_under(keys.leases, found))
        written_s = {name: self.table.written_by(keys.lease(name)) for name in leases}
        known_s = {name: at_s for name, at_s in written_s.items() if at_s is not None}
        return Snapshot(members, leases, known_s)

    async def read_leases(self, incarnations: Collection[str]) -> Mapping[str, Lease]:
        """Read the leases of these incarnations."""
        found = await self.table.read([self.keys.lease(name) for name in incarnations])
        return self._records.leases(_under(self.keys.leases, found))

    async def view_plan(self) -> Plan | None:
        """Return the newest plan that can be read, for callers that decide nothing; None before the first."""
        return await self._plans.read()

    async def read_plan(self) -> Plan | None:
        """Return the newest plan, or None before the first.

        Raises:
            UnknownPlanError: what is there is not a plan, so that the next one cannot be determined.
        """
        return await self._plans.take_over()

    async def read_ended(self) -> Plan | None:
        """Return how the last run of this name ended, whose records were removed."""
        key = self.keys.run.ended
        data = (await self.table.read([key])).get(key)
        if data is None:
            return None
        try:
            return decode(Plan, data)
        except RecordError as error:
            self.report_invalid(f"{self.table.root}{key}: {error}")
            return None

    async def publish(self, plan: Plan) -> None:
        """Write the plan that follows the newest one.

        Raises:
            StoreLostError: also if another coordinator has published meanwhile.
        """
        await self._plans.publish(plan)

    async def write_status(self, text: str) -> None:
        """Write a text that tells what is awaited; overwrites the text before."""
        await self.table.put(self.keys.status, text[:MAX_WAITING_CHARS].encode("utf-8", "replace"))

    async def revoke(self, lease: Lease, why: str = "") -> bool:
        """Compare-and-set the lease to its revoked form; False if it was renewed meanwhile."""
        wanted = encode(lease.revoke(why))
        return await self.table.swap(self.keys.lease(lease.incarnation), encode(lease), wanted) == wanted

    async def forget(self, incarnation: str) -> None:
        """Remove an incarnation's records; for a while they cannot be written again."""
        for key in (self.keys.lease(incarnation), self.keys.member(incarnation)):
            await self.table.put(key, GONE, FORGOTTEN_S)

    async def remove_run(self, ended: Plan | None) -> None:
        """Remove all records of a run that no node uses any more, but for the reports, which nodes read now.

        The life of the records ends first: a node that registers just then detects that at once, or with its next
        renewal, and registers in the next life.

        Args:
            ended: what the next run of its name has to know; None: the run never began.
        """
        run = self.keys.run
        if ended is not None and self.table.is_shared:  # the host of another store has it on its disk
            await self.table.put(run.ended, encode(ended), ENDED_S)
        await self.table.delete([run.life], self.keys.folder)
        # In a store that is shared, every run has a name.
        jobs = {} if self.table.is_shared else await self.table.read_folders(JOBS)
        for key, agreed in jobs.items():
            is_ours = agreed.removeprefix(RELEASED) == run.run_id.encode()
            # Not at once: an agent may just be writing the id of the next run.
            if is_ours and await self.table.swap(key, agreed, CLEARING) == CLEARING:
                await self.table.delete([key])


async def records_of(
    table: Table, run: RunKeys, report_invalid: ReportInvalid = log_invalid
) -> CoordinatorRecords | None:
    """Return the records of the present life of a run; None if it has none."""
    life = await life_of(table, run)
    return CoordinatorRecords(table, LifeKeys(run, life), report_invalid) if life is not None else None


def _under(folder: str, found: Mapping[str, bytes]) -> dict[str, bytes]:
    return {key.removeprefix(folder): data for key, data in found.items() if key.startswith(folder)}


# -- reports -------------------------------------------------------------------------------------

MOST_OTHER_RUNS = 20
"""The most other runs that are read."""


def _ignore(problem: str) -> None:
    """Ignore what is invalid: the coordinator reports it."""


@dataclass(eq=False, repr=False)
class ReportRecords:
    """A connection to the reports of one run. Every call raises :class:`StoreLostError` when the store is gone."""

    table: Table
    """Closed with the records."""
    run_id: str

    def __post_init__(self) -> None:
        self._run = RunKeys(self.run_id)
        self._life: CoordinatorRecords | None = None
        """The records read last, of which most have not changed the next time."""

    async def write_report(self, node_id: str, data: bytes) -> None:
        """Replace the node's reports. A write that arrives late may replace a newer one."""
        await self.table.put(self._run.reports + node_id, data)

    async def read_run(self) -> RunView:
        """Read all that the store holds about the run."""
        found = await self.table.read_folders(self._run.reports)
        reports = {key.removeprefix(self._run.reports): data for key, data in found.items()}
        life = await records_of(self.table, self._run, _ignore)
        if life is None:
            return RunView(reports=reports)
        if self._life is None or self._life.keys.life != life.keys.life:
            self._life = life
        plan, snapshot = await self._life.view_plan(), await self._life.read(None)
        return RunView(plan, await status_in(self.table, life.keys), snapshot, reports)

    async def read_waiting_runs(self) -> dict[str, Snapshot]:
        """Read other runs that wait at this endpoint for nodes and have never had enough, by id; a few at most.

        Empty where many runs that have nothing to do with each other share a store by design.
        """
        if self.table.is_shared:
            return {}
        found: dict[str, Snapshot] = {}
        others = [run_id for run_id in await begun_runs(self.table) if run_id != self._run.run_id]
        for run_id in others[:MOST_OTHER_RUNS]:
            life = await records_of(self.table, RunKeys(run_id), _ignore)
            plan = await life.view_plan() if life is not None else None
            if life is not None and plan is not None and plan.phase is Phase.FORMING and plan.world is None:
                found[run_id] = await life.read(None)
        return found

    async def read_notes(self, names: Collection[str]) -> dict[str, bytes]:
        """Return the notes of these names that are there: what users ask, and what nodes answer."""
        found = await self.table.read([self._run.folder + name for name in names])
        return {key.removeprefix(self._run.folder): data for key, data in found.items()}

    async def write_note(self, name: str, data: bytes, lasts_s: float) -> None:
        """Write a note; after ``lasts_s`` seconds the store may remove it, so its name must not be used again."""
        await self.table.put(self._run.folder + name, data, lasts_s)

    async def change_note(self, name: str, change: Callable[[bytes | None], bytes]) -> None:
        """Replace a note by what ``change`` makes of it, also while others do so."""
        key, stored = self._run.folder + name, (await self.read_notes([name])).get(name)
        while (found := await self.table.swap(key, stored, change(stored))) != change(stored):
            stored = found

    async def remove_notes(self, names: Collection[str]) -> None:
        """Remove the notes of these names."""
        await self.table.delete([self._run.folder + name for name in names])

    def close(self) -> None:
        """Close the connection; never blocks."""
        self.table.close()
