"""The coordinator's records of one run in a store."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from elastic_agent.protocol import Lease, Member, Plan, RecordError, decode, encode

from .base import Snapshot
from .keys import CLEARING, GONE, JOBS, MAX_STATUS_CHARS, RELEASED, LifeKeys
from .plans import PlanReader, PlanWriter, UnknownPlanError
from .record_reader import RecordReader, ReportInvalid, log_invalid
from .table import Table

FORGOTTEN_S = 3600.0
"""For how long at least no forgotten incarnation can be written again."""

ENDED_S = 30 * 24 * 3600.0
"""For how long at least the generation of an ended run is kept, so that the next run of its name goes above it."""


class CoordinatorRecords:
    """The coordinator's connection to one life of a run's records; it alone writes plans.

    Every call raises :class:`StoreLostError` when the store is gone.
    """

    def __init__(self, table: Table, keys: LifeKeys, report_invalid: ReportInvalid = log_invalid) -> None:
        """Use a connection, which the records of other runs may share.

        Args:
            table: the connection.
            keys: of this life of the records.
            report_invalid: called once with a description of each invalid record in the store.
        """
        self._table = table
        self._keys = keys
        self._report_invalid = report_invalid
        self._plans = PlanReader(table, keys, report_invalid)
        self._writer = PlanWriter(table, keys, self._plans)
        self._records = RecordReader(table.root + keys.folder, report_invalid)

    async def read(self, incarnations: Collection[str] | None) -> Snapshot:
        """Read member and lease records of these incarnations, or of all (None)."""
        keys = self._keys
        if incarnations is None:
            found = await self._table.read_folders(keys.members, keys.leases)
        else:
            found = await self._table.read(
                [key for name in incarnations for key in (keys.member(name), keys.lease(name))]
            )
        members: dict[str, Member] = {}
        for name, data in _under(keys.members, found).items():
            member = self._records.member(name, data)
            if member is not None:
                members[name] = member
        leases = self._records.leases(_under(keys.leases, found))
        written_s = {name: self._table.written_by(keys.lease(name)) for name in leases}
        known_s = {name: at_s for name, at_s in written_s.items() if at_s is not None}
        return Snapshot(members, leases, known_s)

    async def read_leases(self, incarnations: Collection[str]) -> Mapping[str, Lease]:
        """Read the leases of these incarnations."""
        found = await self._table.read([self._keys.lease(name) for name in incarnations])
        return self._records.leases(_under(self._keys.leases, found))

    async def read_plan(self) -> Plan | None:
        """Return the newest plan, or None before the first.

        Raises:
            UnknownPlanError: what is there is not a plan, so that the next one cannot be determined.
        """
        plan = await self._plans.newest()
        if self._plans.end > (plan.version if plan is not None else 0):
            raise UnknownPlanError(self._table.root + self._keys.plans)
        return plan

    async def read_ended(self) -> Plan | None:
        """Return how the last run of this name ended, whose records were removed."""
        key = self._keys.run.ended
        data = (await self._table.read([key])).get(key)
        if data is None:
            return None
        try:
            return decode(Plan, data)
        except RecordError as error:
            self._report_invalid(f"{self._table.root}{key}: {error}")
            return None

    async def publish(self, plan: Plan) -> None:
        """Write the plan that follows the newest one.

        Raises:
            StoreLostError: also if another coordinator has published meanwhile.
        """
        await self._writer.publish(plan)

    async def write_status(self, text: str) -> None:
        """Write a text that tells what is awaited; overwrites the text before."""
        await self._table.put(self._keys.status, text[:MAX_STATUS_CHARS].encode("utf-8", "replace"))

    async def revoke(self, lease: Lease, why: str = "") -> bool:
        """Compare-and-set the lease to its revoked form; False if it was renewed meanwhile."""
        wanted = encode(lease.revoke(why))
        return await self._table.swap(self._keys.lease(lease.incarnation), encode(lease), wanted) == wanted

    async def forget(self, incarnation: str) -> None:
        """Remove an incarnation's records; for a while they cannot be written again."""
        for key in (self._keys.lease(incarnation), self._keys.member(incarnation)):
            await self._table.put(key, GONE, FORGOTTEN_S)

    async def remove_run(self, ended: Plan | None) -> None:
        """Remove all records of a run that no node uses any more, but for the reports, which nodes read now.

        The life of the records ends first: a node that registers just then detects that at once, or with its next
        renewal, and registers in the next life.

        Args:
            ended: what the next run of its name has to know; None: the run never began.
        """
        run = self._keys.run
        if ended is not None and self._table.is_shared:  # the host of another store has it on its disk
            await self._table.put(run.ended, encode(ended), ENDED_S)
        await self._table.delete([run.life], self._keys.folder)
        jobs = (
            {} if self._table.is_shared else await self._table.read_folders(JOBS)
        )  # there, every run has a name
        for key, agreed in jobs.items():
            is_ours = agreed.removeprefix(RELEASED) == run.run_id.encode()
            # Not at once: an agent may just be writing the id of the next run.
            if is_ours and await self._table.swap(key, agreed, CLEARING) == CLEARING:
                await self._table.delete([key])


def _under(folder: str, found: Mapping[str, bytes]) -> dict[str, bytes]:
    return {key.removeprefix(folder): data for key, data in found.items() if key.startswith(folder)}
