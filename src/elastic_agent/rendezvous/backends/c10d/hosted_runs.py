"""The runs of a store that this process hosts, for users who ask how they are."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence

from elastic_agent.diagnosis.root_cause import root_cause
from elastic_agent.monitoring.run_log import RunLog
from elastic_agent.monitoring.status import RunStatus, run_status
from elastic_agent.protocol import Plan, waiting_in
from elastic_agent.rendezvous.reports import RunReports, run_reports
from elastic_agent.transport import ReportRecords, TransportError

KEPT_RUNS = 200
"""Of so many runs, the newest, the history is kept; those that are over are forgotten first."""

REPORTED_S = 10.0
"""How long the reports of all nodes on a failure are waited for: those of some may show its consequences alone."""


class HostedRuns:
    """The history of each run, and its status."""

    def __init__(self, endpoint: str, open_records: Callable[[str], Awaitable[ReportRecords]]) -> None:
        """Know no run yet.

        Args:
            endpoint: of the store, as users write it.
            open_records: opens a connection to a run's reports.
        """
        self._endpoint = endpoint
        self._open_records = open_records
        self._logs: dict[str, RunLog] = {}

    def on_plan(self, run_id: str, plan: Plan) -> None:
        """Take note of a run's next plan."""
        log = self._logs.setdefault(run_id, RunLog())
        log.see(plan, time.time())
        if len(self._logs) > KEPT_RUNS:
            over = (
                run_id for run_id, log in self._logs.items() if log.plan is not None and log.plan.is_terminal
            )
            del self._logs[next(over, next(iter(self._logs)))]

    def run_ids(self) -> Sequence[str]:
        """Return all runs that are known, in the order in which they began."""
        return tuple(self._logs)

    async def status(self, run_id: str) -> RunStatus:
        """Return the status of a run.

        Raises:
            LookupError: there is no such run.
        """
        problem, known = "", RunReports()
        try:
            with contextlib.closing(await self._open_records(run_id)) as records:
                known = run_reports(await records.read_run())
        except TransportError as error:
            problem = str(error)
        log = self._logs.get(run_id)
        if log is None:
            raise LookupError(f"there is no run {run_id}")
        _explain(log, known)
        return run_status(
            run_id=run_id,
            endpoint=self._endpoint,
            asked_s=time.time(),
            plan=log.plan,
            waiting=waiting_in(known.view.status),
            members=known.view.snapshot.members,
            leases=known.view.snapshot.leases,
            reports=known.newest,
            since_s=log.since_s,
            generations=log.generations,
            departures=log.departures,
            problem=problem,
        )


def _explain(log: RunLog, known: RunReports) -> None:
    """Explain the failures of the last generations by the reports that there are by now."""
    rows = {row.generation: row for row in log.generations}
    for generation, plan in log.failures.items():
        world, reports, row = log.world(generation), known.of(generation), rows[generation]
        final = {node_id for node_id, report in reports.items() if report.is_final}
        has_all = world is not None and final >= {seat.node_id for seat in world.seats}
        is_late = row.ended_s is not None and time.time() > row.ended_s + REPORTED_S
        if not has_all and not (is_late and (reports or row.is_pending)):
            continue
        if cause := root_cause(reports.values(), plan, world):
            log.explain(generation, cause)
