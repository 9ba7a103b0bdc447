"""Exchanges reports with the other nodes of a run over a c10d store."""

from __future__ import annotations

from elastic_agent.protocol import Phase
from elastic_agent.transport.base import RunView, Snapshot
from elastic_agent.transport.certificates import Secret
from elastic_agent.values import Endpoint

from .connection import open_store
from .coordinator_link import MAX_RUNS_BYTES, C10dCoordinatorLink
from .keys import MAX_STATUS_CHARS, ROOT, names_in, run_prefix
from .reports import read_reports, write_report
from .store import StoreClient

MOST_WAITING_RUNS = 10
"""So many other runs are looked at."""


def dial_reports(
    endpoint: Endpoint, run_id: str, timeout_s: float, secret: Secret | None = None
) -> C10dReportLink:
    """A connection to the store at the endpoint; errors as for :func:`open_store`."""
    client, _, _ = open_store(endpoint, timeout_s, secret)
    return C10dReportLink(client, run_id)


class C10dReportLink:
    """One run's reports (see ``ReportLink``)."""

    def __init__(self, client: StoreClient, run_id: str) -> None:
        self._client = client
        self._run_id = run_id
        self._records = C10dCoordinatorLink(client, run_id, lambda problem: None)

    def write_report(self, node_id: str, data: bytes) -> None:
        """Replace the node's reports."""
        write_report(self._client, self._run_id, node_id, data)

    def read_run(self) -> RunView:
        """All that the store holds about the run."""
        status = self._client.peek(f"{run_prefix(self._run_id)}/status") or b""
        return RunView(
            self._records.read_plan(),
            status[:MAX_STATUS_CHARS].decode("utf-8", "replace"),
            self._records.read(None),
            read_reports(self._client, self._run_id),
        )

    def read_waiting_runs(self) -> dict[str, Snapshot]:
        """The newest other runs that wait for their first world."""
        runs = names_in((self._client.peek(f"{ROOT}/runs") or b"")[-MAX_RUNS_BYTES:])
        found: dict[str, Snapshot] = {}
        for run_id in [one for one in runs if one != self._run_id][-MOST_WAITING_RUNS:]:
            records = C10dCoordinatorLink(self._client, run_id, lambda problem: None)
            plan = records.read_plan()
            if plan is not None and plan.phase is Phase.FORMING and plan.world is None:
                found[run_id] = records.read(None)
        return found

    def close(self) -> None:
        """Release the connection; it closes when no call is in progress any more."""
        self._client.close()
