"""Exchanges reports with the other nodes of a run over etcd."""

from __future__ import annotations

from typing import Any

from elastic_agent.protocol import Lease, Member
from elastic_agent.transport.base import RunView, Snapshot
from elastic_agent.transport.record_reader import RecordReader

from .client import EtcdClient, prefix_end, put
from .keys import MAX_STATUS_CHARS, RunKeys
from .link import KeptLeases
from .plans import PlanReader


class EtcdReportLink:
    """One run's reports (see ``ReportLink``)."""

    def __init__(self, client: EtcdClient, keys: RunKeys, kept: KeptLeases) -> None:
        """``kept``: etcd leases, on one of which this node's report hangs."""
        self._client = client
        self._keys = keys
        self._kept = kept
        self._records = RecordReader(keys.shown)
        self._plans = PlanReader(client, keys.plan, lambda problem: None)

    def write_report(self, node_id: str, data: bytes) -> None:
        """Replace the node's reports."""
        key = self._keys.reports + node_id.encode()
        self._kept.write(
            self._client,
            f"report of {node_id}",
            lambda lease_id: self._client.transact([], [put(key, data, lease_id)]),
        )

    def read_run(self) -> RunView:
        """All that etcd holds about the run."""
        status = self._client.get(self._keys.status)
        text = status.value.decode("utf-8", "replace") if status is not None else ""
        reports = {name: one.value for name, one in self._range(self._keys.reports).items()}
        return RunView(self._plans.read(), text[:MAX_STATUS_CHARS], self._snapshot(), reports)

    def read_waiting_runs(self) -> dict[str, Snapshot]:
        """None: an etcd serves many runs."""
        return {}

    def _snapshot(self) -> Snapshot:
        members: dict[str, Member] = {}
        rejected: list[str] = []
        for name, one in self._range(self._keys.members).items():
            member = self._records.member(name, one.value, rejected)
            if member is not None:
                members[name] = member
        stored = {name: one.value for name, one in self._range(self._keys.leases).items()}
        leases: dict[str, Lease] = self._records.leases(stored, rejected)
        return Snapshot(members, leases, tuple(rejected))

    def _range(self, prefix: bytes) -> dict[str, Any]:
        found = self._client.range(prefix, prefix_end(prefix))
        return {one.key[len(prefix) :].decode("utf-8", "replace"): one for one in found.kvs}

    def close(self) -> None:
        """Release the connection; ends calls in progress."""
        self._client.close()
