"""Member and lease records as they come out of a store: what is none is described once and passed over."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from elastic_agent.logs import get_logger
from elastic_agent.protocol import MAX_TOLD_GENERATION, Lease, Member, RecordError, decode

GONE = b"-"
"""Stands where a forgotten incarnation's records were: they can be written no more."""

_MOST_COMPLAINTS = 1000

Complain = Callable[[str], None]
"""Told in words of what is in the store and should not be."""


def log_complaint(complaint: str) -> None:
    """Log it."""
    get_logger().warning("ignored an invalid record in the store", what=complaint)


class RecordReader:
    """Reads one run's records; most did not change since the last time."""

    def __init__(self, prefix: str) -> None:
        """``prefix``: where the run's keys lie, for complaints."""
        self._prefix = prefix
        self._members: dict[str, tuple[bytes, Member | None]] = {}
        self._rejected: set[str] = set()

    def member(self, name: str, data: bytes, rejected: list[str]) -> Member | None:
        """The record in ``data``; None if it was forgotten, or is bad (which ``rejected`` then says)."""
        if data == GONE:
            self._members.pop(name, None)
            return None
        known = self._members.get(name)
        if known is not None and known[0] == data:
            return known[1]
        member: Member | None = None
        try:
            member = decode(Member, data)
            _check_name(name, member.incarnation)
        except RecordError as error:
            member = None
            self._reject(f"{self._prefix}/m/{name}: {error}", rejected)
        else:
            member = self._without_tale(member, rejected)
        self._members[name] = (data, member)
        return member

    def _without_tale(self, member: Member, rejected: list[str]) -> Member:
        """The member as it is, or without a history that no run can have."""
        told = member.history
        if told is None or told.generation <= MAX_TOLD_GENERATION:
            return member
        self._reject(
            f"{self._prefix}/m/{member.incarnation}: reports generation {told.generation}, which is "
            "above the maximum; the report is ignored",
            rejected,
        )
        return msgspec.structs.replace(member, history=None)

    def leases(self, found: Mapping[str, bytes], rejected: list[str] | None) -> dict[str, Lease]:
        """The leases in these bytes, by incarnation; ``rejected``: where to complain, if anywhere."""
        leases: dict[str, Lease] = {}
        for name, data in found.items():
            if data == GONE:
                continue
            try:
                lease = decode(Lease, data)
                _check_name(name, lease.incarnation)
            except RecordError as error:
                if rejected is not None:
                    self._reject(f"{self._prefix}/l/{name}: {error}", rejected)
            else:
                leases[name] = lease
        return leases

    def _reject(self, complaint: str, rejected: list[str]) -> None:
        if complaint not in self._rejected and len(self._rejected) < _MOST_COMPLAINTS:
            self._rejected.add(complaint)
            rejected.append(complaint)


def lease_in(data: bytes | None, name: str) -> Lease | None:
    """The lease of this incarnation, if that is what it is."""
    if data is None or data == GONE:
        return None
    try:
        lease = decode(Lease, data)
    except RecordError:
        return None
    return lease if lease.incarnation == name else None


def _check_name(expected: str, found: str) -> None:
    if found != expected:
        raise RecordError(f"its name field is {found}")
