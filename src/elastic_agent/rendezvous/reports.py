"""Exchanges reports with the other nodes of the run, over a connection of their own.

Reports explain; they decide nothing. A store that does not answer delays only who waits for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_agent.diagnosis.records import NodeReport, decode_bulletin, encode_bulletin
from elastic_agent.transport import ReportRecords, RunView, Snapshot, TransportError

from .waits import T, in_time

DIAL_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class RunReports:
    """The records that the store holds about the run, and the reports of its nodes."""

    view: RunView = field(default_factory=RunView)
    reports: tuple[NodeReport, ...] = ()
    """Of the last generations of each node, of those that can be read; a node's newest one last."""

    def of(self, generation: int) -> dict[str, NodeReport]:
        """Return node id → its report on this generation."""
        return {report.node_id: report for report in self.reports if report.generation == generation}


def run_reports(view: RunView) -> RunReports:
    """Return what was read, with the reports that can be decoded."""
    each = (decode_bulletin(data) for data in view.reports.values())
    return RunReports(view, tuple(report for reports in each for report in reports))


class Reports:
    """One node's access to the reports of its run.

    Every call raises :class:`TransportError` when the store does not answer.
    """

    def __init__(self, connect: Callable[[], Coroutine[Any, Any, ReportRecords]]) -> None:
        """``connect`` dials the store."""
        self._connect = connect
        self._one_at_a_time = asyncio.Lock()
        self._records: ReportRecords | None = None

    async def write(self, node_id: str, reports: Sequence[NodeReport]) -> None:
        """Replace this node's reports."""
        data = encode_bulletin(reports)
        await self.call(lambda records: records.write_report(node_id, data))

    async def read(self) -> RunReports:
        """Return all that the store holds about the run."""
        return run_reports(await self.call(lambda records: records.read_run()))

    async def read_waiting_runs(self) -> Mapping[str, Snapshot]:
        """Return other runs that wait at this endpoint; see :class:`ReportRecords`."""
        return await self.call(lambda records: records.read_waiting_runs())

    async def call(self, work: Callable[[ReportRecords], Coroutine[Any, Any, T]]) -> T:
        """Carry out ``work`` on the connection."""
        async with self._one_at_a_time:
            try:
                if self._records is None:
                    self._records = await in_time(self._connect(), DIAL_TIMEOUT_S)
                return await in_time(work(self._records), CALL_TIMEOUT_S)
            except (TransportError, asyncio.CancelledError):
                self.close()
                raise

    @property
    def is_connected(self) -> bool:
        """True if the last call was answered."""
        return self._records is not None

    def close(self) -> None:
        """Give up the connection, whatever is under way on it; the next call dials again."""
        records, self._records = self._records, None
        if records is not None:
            records.close()
