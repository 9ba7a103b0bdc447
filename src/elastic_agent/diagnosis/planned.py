"""The cause of a failure as far as the plan tells it: hangs, and workers that could not start. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_agent.protocol import Failure, FailureKind, Plan, Seat

from .cause import CauseKind, RootCause

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
