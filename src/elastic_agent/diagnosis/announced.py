"""Completes reports by the failure that the plan contains: a report may be late, or may not have been written. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec.structs import replace

from elastic_agent.protocol import Failure, FailureKind, Plan, Seat

from .findings import last_error
from .records import NodeReport, WorkerReport, WorkerState

_SUMMARY = re.compile(
    r"worker \S+ (?:exited with code -?\d+(?: \(128 \+ \w+\))?|was (?:killed|terminated) by [\w ]+?)"
    r"(?: \(no space for its output: [^)]*\))?(?:: (?P<error>.*?))?(?: \((?P<hint>[^()]|\([^()]*\))*\))?"
)
"""A failure in one line, as :meth:`elastic_agent.workers.failure.WorkerFailure.summary` writes it."""


def with_announced(
    reports: Sequence[NodeReport], seats: Sequence[Seat], plan: Plan | None
) -> list[NodeReport]:
    """The reports, and that of the node that announced the failure, if it has not reported the worker's end."""
    failure = plan.failure if plan is not None else None
    seat = next((one for one in seats if plan is not None and one.node_id == plan.failed_node), None)
    if (
        plan is None
        or failure is None
        or seat is None
        or failure.slot is None
        or failure.kind is not FailureKind.WORKER
    ):
        return list(reports)
    known = next((one for one in reports if one.node_id == seat.node_id), None)
    if known is None:
        known = NodeReport(seat.node_id, seat.incarnation, 0, 0.0, seat.address)
    if any(one.state is WorkerState.FAILED for one in known.workers):
        return list(reports)
    rest = tuple(one for one in known.workers if one.slot != failure.slot)
    worker = _worker(failure, failure.slot, seat)
    return [
        *(one for one in reports if one.node_id != seat.node_id),
        replace(known, workers=(worker, *rest)),
    ]


def _worker(failure: Failure, slot: int, seat: Seat) -> WorkerReport:
    rank = seat.first_rank + slot
    error = error_in(failure)
    return WorkerReport(
        slot, rank, WorkerState.FAILED, returncode=failure.returncode, error=error, tail=failure.tail
    )


def error_in(failure: Failure) -> str:
    """The error of a worker, without how it ended and without its remedy; empty if it wrote none."""
    from_tail = last_error(failure.tail)
    if from_tail:
        return from_tail[:512]
    found = _SUMMARY.fullmatch(failure.summary)
    return (found["error"] or "") if found is not None else failure.summary
