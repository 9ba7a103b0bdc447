"""The plan of a run in etcd: one key, whose newest revision counts; anything that is not a plan is skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from elastic_agent.protocol import ForeignVersionError, Plan, RecordError, check_follows, check_whole, decode
from elastic_agent.transport.base import StoreLostError
from elastic_agent.transport.sealing import Unverified

from .client import CompactedError, EtcdClient, News

MOST_DAMAGED = 16
"""So many times in a row the key may have been overwritten with something else."""


@lru_cache(maxsize=8)
def _decode_plan(data: bytes) -> Plan:
    """Read once for all connections of the process."""
    plan = decode(Plan, data)
    check_whole(plan)
    return plan


class PlanReader:
    """The newest plan, over one connection; anything else in the key is reported once."""

    def __init__(
        self,
        client: EtcdClient,
        key: bytes,
        report_invalid: Callable[[str], None],
        *,
        is_writer: bool = False,
    ) -> None:
        """Prepare; :meth:`read` reads.

        Args:
            client: the connection.
            key: of the plan.
            report_invalid: called with everything in the key that is not a plan.
            is_writer: whether nothing else writes plans meanwhile: then one that is missing was removed by another
                program, and the newest is the last that was read or written.
        """
        self._is_writer = is_writer
        self._client = client
        self._key = key
        self._report_invalid = report_invalid
        self._reported: set[bytes] = set()
        self.revision = 0
        """In which the key was written last, as of the last reading; 0: it is missing."""
        self.next_revision = 0
        """To go on watching from."""
        self.best: Plan | None = None
        self.foreign = ""
        """Another version of elastic-agent coordinates the run, in words; empty: none does, as far as is known."""
        self.unknown = False
        """There was a plan, which cannot be read any more: no other may be published in its place."""
        self._remembered = b""
        self.knows_all = False
        """Every plan of this life of the run's records that etcd holds was taken."""
        self.is_damaged = False
        """The key holds no plan, or an earlier one, as of the last reading."""

    def wrote(self, plan: Plan, revision: int) -> None:
        """This plan was written in this revision."""
        self.revision, self.best, self.is_damaged = revision, plan, False

    def read(self) -> Plan | None:
        """The newest plan as a majority of etcd has it; a damaged one is skipped."""
        found = self._client.range(self._key)
        self.next_revision = found.header.revision + 1
        self.unknown = False
        self.is_damaged = True
        if not found.kvs:
            self.revision = 0
            if not self._is_writer:
                self.best = None
            return self.best
        (stored,) = found.kvs
        self.revision = stored.mod_revision
        self.is_damaged = not self._take(stored.value)
        if self.is_damaged and self.best is None:
            self.unknown = not self.knows_all and not self._look_back(stored)
        return self.best

    def _look_back(self, stored: Any) -> bool:
        """Take the plan that was overwritten; False if there was one that cannot be read any more."""
        for _ in range(MOST_DAMAGED):
            if stored.mod_revision == stored.create_revision:
                return True  # the key never held a plan
            try:
                (stored,) = self._client.range(self._key, revision=stored.mod_revision - 1).kvs
            except CompactedError:
                return False
            if self._take(stored.value):
                return True
        return False

    def follow(self, news: Iterable[News]) -> Plan | None:
        """The newest plan after these changes, of which some may have been read already."""
        for one in news:
            if one.next_revision > self.next_revision:
                self.next_revision = one.next_revision
                for key, data in one.puts:
                    if key == self._key:
                        self._take(self._client.opened(key, data))
        return self.best

    def remember(self, news: News) -> None:
        """Remember the newest of the plans that the key held meanwhile, for :meth:`take_remembered`.

        Earlier ones are expected among them. They are neither decoded nor reported: there may be very many.
        """
        for key, data in news.puts:
            if key == self._key:
                self._remember(self._client.opened(key, data))

    def remember_at(self, revision: int, least: int) -> bool:
        """The same of what the key held in this revision; False if that was no plan, written in ``least`` or later."""
        found = self._client.range(self._key, revision=revision).kvs
        return all(self._remember(stored.value) or stored.mod_revision < least for stored in found)

    def _remember(self, record: bytes) -> bool:
        if not record or isinstance(record, Unverified):
            return False
        self._remembered = record
        return True

    def take_remembered(self) -> None:
        """Take the newest of the plans that were remembered."""
        if self._remembered:
            self._take(self._remembered)
            self._remembered = b""

    def _take(self, data: bytes) -> bool:
        """This is what the key holds now, or held; whether it is a plan."""
        try:
            if isinstance(data, Unverified):
                raise RecordError(data.why)
            plan = _decode_plan(data)
            check_follows(plan, self.best)
        except RecordError as error:
            self.foreign = str(error) if isinstance(error, ForeignVersionError) else ""
            if data[:200] not in self._reported and len(self._reported) < 100:
                self._reported.add(data[:200])
                self._report_invalid(f"{self._key.decode()}: {error}")
            return False
        self.best, self.foreign = plan, ""
        return True


class UnknownPlanError(StoreLostError):
    """The run has a plan that cannot be read, so the next one cannot be determined."""

    def __init__(self, key: bytes) -> None:
        super().__init__(
            f"{key.decode()} in etcd is not a plan, and etcd has compacted its earlier value; expected "
            "the newest plan; restore it from a backup, or stop every agent of the run, remove its keys "
            "and start it again"
        )
