"""Completes reports by the failure that the plan contains: a report may be late, or may not have been written. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from elastic_agent.protocol import Failure, FailureKind, Plan, Seat

from .known_errors import known_error
from .records import NodeReport, WorkerReport, WorkerState


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
    found = known_error(failure.error) if failure.error else None
    return WorkerReport(
        slot,
        seat.first_rank + slot,
        WorkerState.FAILED,
        returncode=failure.returncode,
        error=failure.error,
        tail=failure.tail,
        known=found.name if found is not None else "",
        peer=found.peer if found is not None else "",
        peer_rank=found.rank if found is not None else None,
    )
