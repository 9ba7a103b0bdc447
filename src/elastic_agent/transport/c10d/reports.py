"""Reports of a run's nodes in a c10d store."""

from __future__ import annotations

from .keys import ROOT, enlist, names_in, report_key, run_prefix
from .store import StoreClient

KEPT_RUNS = 8
"""Of so many ended runs the reports are kept: nodes read them when the run's other records are gone already."""


def write_report(client: StoreClient, run_id: str, node_id: str, data: bytes) -> None:
    """Replace a node's reports."""
    prefix = run_prefix(run_id)
    if node_id not in names_in(client.peek(f"{prefix}/reporters") or b""):
        enlist(client, f"{prefix}/reporters", node_id)
    client.put(report_key(prefix, node_id), data)
    client.confirm()


def read_reports(client: StoreClient, run_id: str) -> dict[str, bytes]:
    """The reports of each node, by node id."""
    keys = {node_id: report_key(run_prefix(run_id), node_id) for node_id in _reporters(client, run_id)}
    found = client.peek_many([*keys.values()])
    return {node_id: data for node_id, key in keys.items() if (data := found.get(key))}


def remove_old_reports(client: StoreClient, ended_run: str) -> None:
    """A run has ended: keep its reports, and remove those of the oldest ended ones."""
    key = f"{ROOT}/ended"
    enlist(client, key, ended_run)
    listed = client.peek(key) or b""
    names = [name for name in names_in(listed) if name != ended_run] + [ended_run]
    for run_id in names[:-KEPT_RUNS]:
        prefix = run_prefix(run_id)
        reports = [report_key(prefix, node_id) for node_id in _reporters(client, run_id)]
        client.delete([*reports, f"{prefix}/reporters"])
    client.put(key, "".join(f"\n{name}\n" for name in names[-KEPT_RUNS:]).encode())


def _reporters(client: StoreClient, run_id: str) -> list[str]:
    return names_in(client.peek(f"{run_prefix(run_id)}/reporters") or b"")
