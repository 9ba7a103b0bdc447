"""Reads member and lease records from a store: an invalid one is described once and skipped."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from elastic_agent.logs import get_logger
from elastic_agent.protocol import Lease, Member, RecordError, decode

from .keys import GONE

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
        """Return the record in ``data``; None if it was forgotten, or is invalid."""
        if data == GONE:
            return None
        try:
            member = decode(Member, data)
            _check_name(name, member.incarnation)
        except RecordError as error:
            self._report(f"{self._prefix}m/{name}: {error}")
            return None
        return member

    def leases(self, found: Mapping[str, bytes]) -> dict[str, Lease]:
        """Return the leases in these bytes, by incarnation."""
        leases: dict[str, Lease] = {}
        for name, data in found.items():
            if data == GONE:
                continue
            try:
                lease = decode(Lease, data)
                _check_name(name, lease.incarnation)
            except RecordError as error:
                self._report(f"{self._prefix}l/{name}: {error}")
            else:
                leases[name] = lease
        return leases


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


def _check_name(expected: str, found: str) -> None:
    if found != expected:
        raise RecordError(f"its name field is {found}")
