"""The restart budget: which failures count, when they are forgiven, how a crash loop slows down and ends. Pure.

The budget is a bucket of ``max_restarts``. A charged failure takes one out; each ``restart_window_s`` of progress puts
one back. Progress is time in which the whole world ran, counted by the coordinator's clock as lengths of time, never
as dates, and kept in the plan, so that it outlives coordinators, stores and requeues. A generation that ended within
:data:`PROGRESS_S` (or a window, if that is shorter) made none, unless the node that failed says that a worker got
further than before: by its steps, by heartbeats without steps, or by its optimizer steps. What was counted since the
plan was written last is lost with its coordinator: then failures are forgiven later, never sooner.

Failures that follow each other without progress are a crash loop: its restarts pause for longer and longer, and one
that repeats the failure before it, the same error at the same place, ends the run.
"""

from __future__ import annotations

import msgspec

from .cluster_view import PROGRESS_S, ClusterView
from .leases import FAR_S
from .records import MAX_COUNT, Budget, Failure, FailureKind, Phase, Plan, Policy

FIRST_PAUSE_S = 1.0
"""Of a crash loop's second restart; the first is not delayed, and each later one twice as long as the one before."""

LONGEST_PAUSE_S = 60.0

WRITES_PER_WINDOW = 10
"""The number of times in a window that the progress is written into the plan while failures are to be forgiven."""

WRITTEN_EVERY_S = 1.0
"""Nor more often than this, however short the window."""


def remaining_restarts(plan: Plan) -> int:
    """Return how many more failures the run survives; negative if the budget was reduced meanwhile."""
    counting = plan.charged - _forgiven(plan).forgiven
    return min(plan.policy.max_restarts - counting, MAX_COUNT - plan.charged)


def repeats(plan: Plan) -> bool:
    """Return whether the failure that ended the generation also ended the one before, without progress."""
    return plan.failure is not None and plan.failure.signature == plan.budget.signature != ""


def end_reason(plan: Plan, failure: str) -> str:
    """Return why the run ends with the failure of ``plan``, if that is charged; empty: it goes on.

    ``failure``: in words, those of the plan or of its root cause.
    """
    if remaining_restarts(plan) <= 0:
        most = plan.policy.max_restarts
        used = {0: "no restarts are allowed", 1: "the only restart is used"}
        before, after = "", f"; {used.get(most, f'all {most} restarts are used')}"
    elif repeats(plan):
        before = "the same failure repeated without progress: "
        after = "; remove the cause, then start the run again"
    else:
        return ""
    room = 512 - len(before) - len(after)
    return before + (failure if len(failure) <= room else failure[: room - 1] + "…") + after


def pause_s(plan: Plan) -> float:
    """Return how long after the failure the next generation may be sealed, if the failure is charged."""
    if not plan.budget.in_a_row:
        return 0.0
    doublings = min(plan.budget.in_a_row - 1, 30)
    return min(FIRST_PAUSE_S * 2.0**doublings, LONGEST_PAUSE_S)


def charged(plan: Plan) -> Plan:
    """Return the plan with the failure that it is about taken out of the budget."""
    signature = plan.failure.signature if plan.failure is not None else ""
    in_a_row = min(plan.budget.in_a_row + 1, MAX_COUNT)
    budget = msgspec.structs.replace(_forgiven(plan), in_a_row=in_a_row, signature=signature)
    return msgspec.structs.replace(plan, charged=plan.charged + 1, budget=budget)


def not_charged(plan: Plan) -> Plan:
    """Return the plan when its generation ended without a failure that counts: nothing repeats what was before."""
    return msgspec.structs.replace(plan, budget=msgspec.structs.replace(plan.budget, signature=""))


def _forgiven(plan: Plan) -> Budget:
    """Return the budget with every failure forgiven that the progress is enough for."""
    budget, window_s = plan.budget, plan.policy.restart_window_s
    if window_s <= 0:
        return budget
    counting = plan.charged - budget.forgiven
    windows = min(int(budget.progress_s // window_s), counting)
    rest_s = budget.progress_s - windows * window_s if windows < counting else 0.0
    return msgspec.structs.replace(budget, forgiven=budget.forgiven + windows, progress_s=rest_s)


# -- progress ---------------------------------------------------------------------------------------


def with_progress(now: ClusterView, plan: Plan) -> Plan:
    """Return ``plan``, which is to follow a running one, with the progress that the world has made until now."""
    failure = plan.failure
    if _made_progress(now, failure):
        stalled_s = failure.stalled_s if failure is not None else 0.0
        seconds = min(max(0.0, _progress_s(now, plan) - stalled_s), _most_s(plan))
        budget = msgspec.structs.replace(plan.budget, progress_s=seconds, in_a_row=0, signature="")
        if failure is not None:  # only a failure before any progress can repeat
            failure = msgspec.structs.replace(failure, signature="")
        return msgspec.structs.replace(plan, budget=budget, failure=failure)
    if _delays(plan):
        reason = f"{plan.reason}; restarting in {pause_s(plan):g} s"
        return msgspec.structs.replace(plan, reason=reason if len(reason) <= 512 else plan.reason)
    return plan


def write_at_s(now: ClusterView) -> float:
    """Return when the progress of the running world is to be written into the plan next, if nothing happens before."""
    budget, began_s = now.plan.budget, now.clock.world_runs_since_s
    if began_s is None:
        return FAR_S
    first_s = began_s + _least_s(now.policy)
    if budget.in_a_row:
        return first_s
    if budget.progress_s >= _most_s(now.plan):
        return FAR_S
    interval_s = max(now.policy.restart_window_s / WRITES_PER_WINDOW, WRITTEN_EVERY_S)
    return max(first_s, began_s + budget.progress_s - now.clock.progress_before_s + interval_s)


def _least_s(policy: Policy) -> float:
    """Return from when on a world has made progress."""
    return min(PROGRESS_S, policy.restart_window_s) if policy.restart_window_s > 0 else PROGRESS_S


def _most_s(plan: Plan) -> float:
    """Return how much progress is counted at most: more has nothing to forgive."""
    return (plan.charged - plan.budget.forgiven) * plan.policy.restart_window_s


def _made_progress(now: ClusterView, failure: Failure | None) -> bool:
    began_s = now.clock.world_runs_since_s
    lasted = began_s is not None and now.now_s >= began_s + _least_s(now.policy)
    return lasted or (failure is not None and failure.progressed)


def _progress_s(now: ClusterView, plan: Plan) -> float:
    """Return the progress that the plan holds, and what was counted since the world started to run."""
    began_s, known_s = now.clock.world_runs_since_s, plan.budget.progress_s
    if began_s is None:
        return known_s
    return max(known_s, now.clock.progress_before_s + now.now_s - began_s)


def _delays(plan: Plan) -> bool:
    """Return whether the restart that this plan brings about will pause, unless a participant turns out to be lost."""
    failure = plan.failure
    charges = failure is not None and failure.kind in (FailureKind.WORKER, FailureKind.HANG) and not plan.free
    goes_on = plan.phase is Phase.FORMING and remaining_restarts(plan) > 0 and not repeats(plan)
    return charges and goes_on and plan.notice is None and pause_s(plan) > 0
