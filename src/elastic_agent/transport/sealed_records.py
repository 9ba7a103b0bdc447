"""Which records of a store are authenticated, and how a connection seals and opens them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from elastic_agent.protocol import MAX_AHEAD, Lease, Plan, RecordError, decode

from .record_reader import GONE
from .sealing import Seal, Unverified

REVOKED, FORGOTTEN = 2**61, 2**62
"""Added to the number of a lease that is revoked; the number of what replaces a lease or a member record for good."""


@dataclass(frozen=True)
class RecordKinds:
    """Patterns of the paths under which a store holds records. Those of no kind are not authenticated: they are names
    to look under, or parts that are read by their digests."""

    of_run: re.Pattern[str]
    """Records that decisions depend on, or that users read."""
    without_epoch: re.Pattern[str]
    """Records that are written before the epoch of a run is known, or are read after it."""
    member: re.Pattern[str]
    lease: re.Pattern[str]
    plan: re.Pattern[str] | None = None
    """The newest plan, if each replaces the one before; None: the path of a plan has its version."""


@dataclass
class RunSeal:
    """The seals of one run in one life of its store, and how far its numbered records have come."""

    base: Seal
    """For what is written before the epoch is known."""
    seal: Seal
    newest: dict[str, int] = field(default_factory=dict)
    """The highest sequence number seen under each path."""


class SealedRecords:
    """Seals and opens the records of one connection. Earlier members, leases and plans must not come back."""

    def __init__(self, seals: RunSeal, kinds: RecordKinds) -> None:
        self._seals = seals
        self._kinds = kinds

    def closed(self, key: str, record: bytes) -> bytes:
        """The bytes of a new record under this key. None are none: an empty value counts like a missing one."""
        seal = self._seal(key)
        if seal is None or not record:
            return record
        is_counted = self._is_counted(key, record)
        number = self._seals.newest.get(key, 0) + 1 if is_counted else self._number(key, record)
        return seal.close(key, record, number)

    def expected(self, key: str, record: bytes) -> bytes:
        """The bytes that are stored if this record, which was read or written before, is still there."""
        if isinstance(record, Unverified):
            return record.raw
        seal = self._seal(key)
        if seal is None or not record:
            return record
        is_counted = self._is_counted(key, record)
        number = self._seals.newest.get(key, 0) if is_counted else self._number(key, record)
        return seal.close(key, record, number)

    def opened(self, key: str, data: bytes) -> bytes:
        """The record in these bytes; ``Unverified`` if it was not written with the run's key, or is an old one."""
        seal = self._seal(key)
        if seal is None or not data:
            return data
        record, number = seal.open_numbered(key, data)
        if not isinstance(record, Unverified) and self._is_numbered(key):
            newest = self._seals.newest.get(key, 0)
            if number < newest:
                return Unverified.of(
                    data, "it is older than the one before (written back by another program)"
                )
            if not (self._is_plan(key) and newest and number > newest + MAX_AHEAD):  # its readers reject it
                self._seals.newest[key] = number
        return record

    def newest(self, key: str) -> int:
        """The highest number seen under this key, 0 if none was."""
        return self._seals.newest.get(key, 0)

    def _seal(self, key: str) -> Seal | None:
        if self._kinds.of_run.fullmatch(key):
            return self._seals.seal
        return self._seals.base if self._kinds.without_epoch.fullmatch(key) else None

    def _is_counted(self, key: str, record: bytes) -> bool:
        """Whether it is a member record, which nothing in it numbers; what replaces one for good has a number."""
        return record != GONE and bool(self._kinds.member.fullmatch(key))

    def _is_numbered(self, key: str) -> bool:
        is_record = self._kinds.member.fullmatch(key) or self._kinds.lease.fullmatch(key)
        return bool(is_record) or self._is_plan(key)

    def _is_plan(self, key: str) -> bool:
        return self._kinds.plan is not None and bool(self._kinds.plan.fullmatch(key))

    def _number(self, key: str, record: bytes) -> int:
        """Grows with each renewal of a lease and its revocation, which is final, and with each plan; else 0."""
        is_lease = self._kinds.lease.fullmatch(key)
        if record == GONE and self._is_numbered(key):
            return FORGOTTEN
        try:
            if is_lease:
                lease = decode(Lease, record)
                return lease.beat + (REVOKED if lease.revoked else 0)
            if self._is_plan(key):
                return decode(Plan, record).version
        except RecordError:
            return FORGOTTEN if is_lease else 0
        return 0
