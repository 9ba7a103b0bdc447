"""What the plan that ended a generation tells of its failure. Pure.

It is the cause of hangs, and of workers that could not start. For others it completes the reports: one may be late, or
may not have been written.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from elastic_agent.protocol import Failure, FailureKind, Plan, Seat

from .cause import CauseKind, RootCause
from .known_errors import known_error
from .records import NodeReport, WorkerReport, WorkerState

_START_KINDS = frozenset({FailureKind.START, FailureKind.BOOTSTRAP, FailureKind.TOO_FEW})

_WAITS = "see what the worker does at that line; if that may take so long, raise --hang-timeout"


def is_hang(plan: Plan | None) -> bool:
    """Whether the generation was ended because its workers made no progress."""
    return plan is not None and plan.failure is not None and plan.failure.kind is FailureKind.HANG


def planned_failure(generation: int, seats: Sequence[Seat], plan: Plan | None) -> RootCause | None:
    """The failure that the plan contains; None without one."""
    failure = plan.failure if plan is not None else None
    if plan is None or failure is None:
        return None
    kind = CauseKind.START if failure.kind in _START_KINDS else CauseKind.UNKNOWN
    kind = CauseKind.HANG if failure.kind is FailureKind.HANG else kind
    node_id, slot = _culprit(failure, plan.failed_node or "")
    seat = next((one for one in seats if one.node_id == node_id), None)
    slot = slot if kind is not CauseKind.START else None
    return RootCause(
        generation,
        kind,
        failure.words,
        node_id=node_id,
        slot=slot,
        rank=seat.first_rank + slot if seat is not None and slot is not None else None,
        remedy=_WAITS if kind is CauseKind.HANG and slot is not None else "",
        tail=failure.tail,
        is_certain=failure.is_certain,
    )


def _culprit(failure: Failure, failed_node: str) -> tuple[str, int | None]:
    """Node and slot. Every node announces a hang, so the one to blame is the one that it names."""
    if failure.kind is FailureKind.HANG:
        return failure.culprit or "", failure.culprit_slot
    return failed_node, failure.slot


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
