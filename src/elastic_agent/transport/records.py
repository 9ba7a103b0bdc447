"""A node's records of one run in a store: its registration, its lease, and the plans that it follows."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastic_agent.printable import on_one_line
from elastic_agent.protocol import (
    MAX_WAITING_CHARS,
    ForeignVersionError,
    Lease,
    Member,
    Plan,
    RecordError,
    State,
    decode,
    encode,
)

from .base import OtherVersionError, StoreLostError, Table
from .keys import GONE, RUNS, LifeKeys, RunKeys, begun_run_in, name_in
from .record_reader import Plans, ReportInvalid, lease_in, lease_over, log_invalid


async def begun_runs(table: Table) -> list[str]:
    """Return the ids of all runs in which a node has registered, or that have a plan."""
    found = (begun_run_in(key) for key in await table.keys(RUNS))
    return list(dict.fromkeys(run_id for run_id in found if run_id is not None))


async def runs_with_nodes(table: Table) -> list[str]:
    """Return the ids of all runs that a node takes part in, or was lost from a short time ago."""
    found: dict[str, None] = {}
    for key, data in (await table.read_folders(RUNS)).items():
        with contextlib.suppress(RecordError):
            if "/m/" in key and decode(Member, data).state is not State.LEFT:
                found[key.split("/")[1]] = None
    return list(found)


async def life_of(table: Table, run: RunKeys) -> str | None:
    """Return the name of the present life of the run's records; None before the first node and after the last."""
    return name_in((await table.read([run.life])).get(run.life, b""))


async def begun_life_of(table: Table, run: RunKeys) -> str:
    """Return the same, having begun one if there is none.

    Raises:
        StoreLostError: something else stands under its key.
    """
    stored = (await table.read([run.life])).get(run.life)
    if stored is None:
        stored = await table.swap(run.life, None, secrets.token_hex(4).encode())
    life = name_in(stored or b"")
    if life is None:
        raise StoreLostError(f"{table.root}{run.life} in the store was not written by elastic-agent")
    return life


@dataclass(eq=False, repr=False)
class NodeRecords:
    """A node's connection to one run. Every call raises :class:`StoreLostError` when the store is gone."""

    table: Table
    """The connection; closed with the records."""
    keys: LifeKeys
    report_invalid: ReportInvalid = log_invalid
    """Called with a description of each invalid record in the store."""
    on_renewal: Callable[[], None] = lambda: None
    """Called when a lease was written."""
    clock: Callable[[], float] = time.monotonic
    """Seconds."""

    def __post_init__(self) -> None:
        self._plans = Plans(self.table, self.keys, self.report_invalid)
        self._written: dict[str, bytes] = {}
        """Each incarnation's member record as this connection knows it."""
        self.store_id = f"{self.table.store_id}.{self.keys.life}"
        """Random name of this life of the store, and of the run in it."""
        self.local_address = self.table.local_address
        """The address of this machine on the way to the store."""

    @classmethod
    async def open(
        cls,
        table: Table,
        run_id: str,
        report_invalid: ReportInvalid = log_invalid,
        on_renewal: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> NodeRecords:
        """Take part in the present life of a run's records, or begin one; the arguments are the fields."""
        run = RunKeys(run_id)
        # First: should the run be removed meanwhile, :meth:`register` finds another life.
        keys = LifeKeys(run, await begun_life_of(table, run))
        return cls(table, keys, report_invalid, on_renewal, clock)

    async def register(self, member: Member, lease: Lease) -> Lease | None:
        """Register an incarnation with its first records (or write them again).

        Returns:
            The lease as it was written, which differs from ``lease`` in its beat if an earlier one of this
            incarnation was there; None, and nothing is written, if that one was revoked or forgotten.

        Raises:
            StoreLostError: also if an earlier run of this name was removed since the connection was made; plan
                versions restart then, as in a new store.
        """
        granted = await self._claim(lease)
        if granted is None:
            return None
        if not await self._replace(member, self._written.get(member.incarnation)):
            return None
        await self.table.hint(self.keys.run.run_id, member.incarnation)
        await self._check_life()
        self.on_renewal()
        return granted

    async def _claim(self, lease: Lease) -> Lease | None:
        """Write the lease; as written, see :func:`lease_over`."""
        key = self.keys.lease(lease.incarnation)
        stored = (await self.table.read([key])).get(key)
        while (following := lease_over(stored, lease)) is not None:
            stored = await self.table.swap(key, stored, encode(following))
            if stored == encode(following):
                return following
        return None

    async def _check_life(self) -> None:
        if await life_of(self.table, self.keys.run) != self.keys.life:
            raise StoreLostError("the store has removed the records of the earlier run of this name")

    async def write(self, member: Member) -> None:
        """Replace the member record, if the incarnation is still known; a late write never undoes a newer one."""
        name, key = member.incarnation, self.keys.member(member.incarnation)
        known = self._written.get(name)
        if known is None:  # an earlier connection registered it
            known = (await self.table.read([key])).get(key)
        if known != GONE and await self._replace(member, known):
            await self.table.hint(self.keys.run.run_id, name)

    async def _replace(self, member: Member, known: bytes | None) -> bool:
        """Compare-and-set the member record, whatever else has been written since; False if it was forgotten.

        What sits in a connection that was given up can arrive any time later: by then it expects another record.
        """
        name, data = member.incarnation, encode(member)
        while (stored := await self.table.swap(self.keys.member(name), known, data)) != data:
            if stored == GONE or (stored is None and await self.read_lease(name) is None):
                return False
            known = stored
        self._written[name] = data
        return True

    async def renew(self, expected: Lease, renewed: Lease) -> bool:
        """Compare-and-set the lease; False if it is not as expected any more (revoked, or gone).

        Raises:
            StoreLostError: also if the records of this run were removed. Others would begin the next run of its name,
                in which nothing of this connection counts.
        """
        wanted = encode(renewed)
        stored = await self.table.swap(self.keys.lease(expected.incarnation), encode(expected), wanted)
        if stored is None:
            await self._check_life()
        if stored == wanted:
            self.on_renewal()
        return stored == wanted

    async def read_lease(self, incarnation: str) -> Lease | None:
        """Return the lease as it stands, or None; also where something else was written over it."""
        key = self.keys.lease(incarnation)
        return lease_in((await self.table.read([key])).get(key), incarnation)

    async def read_plan(self) -> Plan | None:
        """Return the newest plan, or None before the first."""
        return await self._plans.read()

    async def read_status(self) -> str:
        """Return the text that tells what the coordinator waits for; empty if it wrote nothing."""
        return await status_in(self.table, self.keys)

    async def next_plan(self, after_version: int, timeout_s: float) -> Plan | None:
        """Wait, without polling, until a plan newer than ``after_version`` is there; None at the time-out.

        Plans may be skipped: the newest is returned.

        Raises:
            OtherVersionError: no plan can be read, because another version of elastic-agent coordinates the run.
        """
        deadline_s = self.clock() + timeout_s
        newest, version, is_woken = self._plans.newest, after_version + 1, False
        is_read = newest is not None and newest.version == after_version
        while True:
            plan = newest if is_read else await self._plans.read()
            if plan is not None and plan.version > after_version:
                return plan
            if plan is None and isinstance(self._plans.problem, ForeignVersionError):
                raise OtherVersionError(str(self._plans.problem))
            remaining_s = deadline_s - self.clock()
            if remaining_s <= 0:
                return None
            bell, is_read = self.keys.bell(version), False
            if is_woken and await self.table.read([bell]):  # it rang for a plan that cannot be read
                version, is_woken = version + 1, False
            else:
                is_woken = await self.table.wait(bell, remaining_s)

    def close(self) -> None:
        """Close the connection; never blocks."""
        self.table.close()


async def status_in(table: Table, keys: LifeKeys) -> str:
    """Return what the coordinator waits for, in words, on one line."""
    text = (await table.read([keys.status])).get(keys.status, b"").decode("utf-8", "replace")
    return on_one_line(text[:MAX_WAITING_CHARS])
