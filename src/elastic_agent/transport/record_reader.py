"""Reads records from a store: an invalid one is described once and skipped; and the newest plan, which is also written.

A run's plan lies under one key, and a bell of each version beside it. A plan replaces the one before by
compare-and-set, so that of two coordinators one fails. A TCPStore lets its clients wait for a key to be there, not for
one to change: so when a version is written, a key of its own follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from elastic_agent.logs import get_logger
from elastic_agent.protocol import (
    MAX_REPORTED_GENERATION,
    Lease,
    Member,
    Plan,
    RecordError,
    check_whole,
    decode,
    encode,
)

from .base import StoreLostError, Table
from .keys import GONE, LifeKeys

Record = TypeVar("Record", Member, Lease)

_MOST_REPORTED = 1000

ReportInvalid = Callable[[str], None]
"""Called with a description of each invalid record in the store."""


def log_invalid(problem: str) -> None:
    """Log it."""
    get_logger().warning("ignored an invalid record in the store", what=problem)


def once(report_invalid: ReportInvalid) -> ReportInvalid:
    """Return what reports each problem once."""
    reported: set[str] = set()

    def report(problem: str) -> None:
        if problem not in reported and len(reported) < _MOST_REPORTED:
            reported.add(problem)
            report_invalid(problem)

    return report


class RecordReader:
    """Reads one run's records."""

    def __init__(self, prefix: str, report_invalid: ReportInvalid = log_invalid) -> None:
        """``prefix``: of the run's keys, for descriptions of invalid records, each of which is reported once."""
        self._prefix = prefix
        self._report = once(report_invalid)

    def member(self, name: str, data: bytes) -> Member | None:
        """Return the record in ``data`` without an impossible history; None if it was forgotten, or is invalid."""
        member = self._record(Member, "m", name, data)
        if member is None or member.history is None or member.history.generation <= MAX_REPORTED_GENERATION:
            return member
        self._report(
            f"{self._prefix}m/{name}: reports generation {member.history.generation}, which is above the maximum; "
            "the report is ignored"
        )
        return msgspec.structs.replace(member, history=None)

    def leases(self, found: Mapping[str, bytes]) -> dict[str, Lease]:
        """Return the leases in these bytes, by incarnation."""
        leases = {name: self._record(Lease, "l", name, data) for name, data in found.items()}
        return {name: lease for name, lease in leases.items() if lease is not None}

    def _record(self, kind: type[Record], folder: str, name: str, data: bytes) -> Record | None:
        """Return the record of this incarnation in ``data``; None if it was forgotten, or is invalid."""
        if data == GONE:
            return None
        try:
            record = decode(kind, data)
            if record.incarnation != name:
                raise RecordError(f"its name field is {record.incarnation}")
        except RecordError as error:
            self._report(f"{self._prefix}{folder}/{name}: {error}")
            return None
        return record


def lease_in(data: bytes | None, name: str) -> Lease | None:
    """Return the lease of this incarnation, if that is what it is."""
    if data is None or data == GONE:
        return None
    try:
        lease = decode(Lease, data)
    except RecordError:
        return None
    return lease if lease.incarnation == name else None


def lease_over(stored: bytes | None, lease: Lease) -> Lease | None:
    """Return this lease as it may be written over what is stored; None if that is revoked or was removed.

    It never equals an earlier one of its incarnation: the coordinator counts the time from when it saw a lease change.
    """
    earlier = lease_in(stored, lease.incarnation)
    if stored == GONE or (earlier is not None and earlier.revoked):
        return None
    return lease if earlier is None else msgspec.structs.replace(lease, beat=earlier.beat + 1)


KEPT_BELLS = 256
"""The number that stays, for nodes that were stopped between reading a plan and waiting for the next."""


class UnknownPlanError(StoreLostError):
    """The run has a plan that cannot be read, so the next one cannot be determined."""


@dataclass(eq=False, repr=False)
class Plans:
    """The plans of one run over one connection."""

    table: Table
    keys: LifeKeys
    report_invalid: ReportInvalid
    """Called once with everything in the store that is not a plan."""

    def __post_init__(self) -> None:
        self._report_invalid = once(self.report_invalid)
        self.newest: Plan | None = None
        """The newest plan, as of the last reading or writing."""
        self._stored: bytes | None = None
        """The value in the store, as of then."""
        self.problem: RecordError | None = None
        """The reason why that is no plan that can be read."""

    async def read(self) -> Plan | None:
        """Return the newest plan, or None; what is not a plan is reported, and hides none that was read before."""
        stored = (await self.table.read([self.keys.plan])).get(self.keys.plan)
        if stored != self._stored:
            self._stored, self.problem = stored, None
            if stored is not None:
                self._take(stored)
        return self.newest

    def _take(self, stored: bytes) -> None:
        try:
            plan = decode(Plan, stored)
            check_whole(plan)
        except RecordError as error:
            self.problem = error
            self._report_invalid(f"{self.table.root}{self.keys.plan}: {error}")
        else:
            self.newest = plan

    async def take_over(self) -> Plan | None:
        """Return the newest plan, for a coordinator; its bell is rung, as the one before may have ended meanwhile.

        Raises:
            UnknownPlanError: what is there is not a plan.
        """
        plan = await self.read()
        if self.problem is not None:
            raise UnknownPlanError(
                f"what {self.table.root}{self.keys.plan} in the store holds is not a plan; expected the newest plan; "
                "restore it from a backup, or stop every agent of the run, remove its keys and start it again"
            )
        if plan is not None:
            await self._ring(plan.version)
        return plan

    async def publish(self, plan: Plan) -> None:
        """Write the version that follows the newest one.

        Raises:
            StoreLostError: also if another one stands there by now: the store has to be read again.
        """
        newest = self.newest or await self.read()
        follows = plan.version == (newest.version if newest is not None else 0) + 1
        key, data = self.keys.plan, encode(plan)
        if not follows or await self._replace(data) != data:
            raise StoreLostError(f"another coordinator has written {self.table.root}{key}")
        self.newest, self._stored = plan, data
        await self._ring(plan.version)
        if plan.version > KEPT_BELLS:
            await self.table.delete([self.keys.bell(plan.version - KEPT_BELLS)])

    async def _replace(self, data: bytes) -> bytes | None:
        stored = await self.table.swap(self.keys.plan, self._stored, data)
        if stored is None and self._stored is not None:  # another client deleted it: nodes go on without it
            stored = await self.table.swap(self.keys.plan, None, data)
        return stored

    async def _ring(self, version: int) -> None:
        await self.table.put(self.keys.bell(version), b"1")
