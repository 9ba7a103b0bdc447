"""The plan of a run in etcd: one key, whose newest revision counts; anything that is not a plan is skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

from elastic_agent.protocol import ForeignVersionError, Plan, RecordError, check_follows, check_whole, decode
from elastic_agent.transport.base import StoreLostError

from .client import EtcdClient, News


@lru_cache(maxsize=8)
def _decode_plan(data: bytes) -> Plan:
    """Read once for all connections of the process."""
    plan = decode(Plan, data)
    check_whole(plan)
    return plan


class PlanReader:
    """The newest plan, over one connection; anything else in the key is reported once."""

    def __init__(self, client: EtcdClient, key: bytes, report_invalid: Callable[[str], None]) -> None:
        """Prepare; :meth:`read` reads.

        Args:
            client: the connection.
            key: of the plan.
            report_invalid: called with everything in the key that is not a plan.
        """
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

    def wrote(self, plan: Plan, revision: int) -> None:
        """This plan was written in this revision."""
        self.revision, self.best = revision, plan

    def read(self) -> Plan | None:
        """The newest plan as a majority of etcd has it; anything else in the key is skipped."""
        found = self._client.range(self._key)
        self.next_revision = found.header.revision + 1
        if not found.kvs:
            self.revision, self.best = 0, None
            return None
        (stored,) = found.kvs
        self.revision = stored.mod_revision
        self._take(stored.value)
        return self.best

    @property
    def is_unknown(self) -> bool:
        """Whether the key held something as of the last reading, and no plan is known."""
        return self.revision > 0 and self.best is None

    def follow(self, news: Iterable[News]) -> Plan | None:
        """The newest plan after these changes, of which some may have been read already."""
        for one in news:
            if one.next_revision > self.next_revision:
                self.next_revision = one.next_revision
                if self._key in one.written:
                    self._take(one.written[self._key])
        return self.best

    def _take(self, data: bytes) -> None:
        """This is what the key holds now."""
        try:
            plan = _decode_plan(data)
            check_follows(plan, self.best)
        except RecordError as error:
            self.foreign = str(error) if isinstance(error, ForeignVersionError) else ""
            if data[:200] not in self._reported and len(self._reported) < 100:
                self._reported.add(data[:200])
                self._report_invalid(f"{self._key.decode()}: {error}")
        else:
            self.best, self.foreign = plan, ""


class UnknownPlanError(StoreLostError):
    """The run has a plan that cannot be read, so the next one cannot be determined."""

    def __init__(self, key: bytes) -> None:
        super().__init__(
            f"{key.decode()} in etcd is not a plan; expected the newest plan; restore it from a backup, or stop "
            "every agent of the run, remove its keys and start it again"
        )
