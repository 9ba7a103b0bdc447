"""The ends of workers, as failures that nodes exchange and as reports."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from elastic_agent.agent import events
from elastic_agent.client._cells import HeartbeatFile
from elastic_agent.diagnosis.known_errors import ending
from elastic_agent.diagnosis.records import GroupProgress, WorkerReport, WorkerState
from elastic_agent.linux import boottime_s
from elastic_agent.logs import get_logger
from elastic_agent.printable import without_surrogates
from elastic_agent.protocol import Failure, FailureKind, count
from elastic_agent.workers.cleanup import SweepReport
from elastic_agent.workers.context import WorkerContext
from elastic_agent.workers.end import WorkerEnd
from elastic_agent.workers.failure import WorkerFailure

ENDED_BY_STOP = (0, -signal.SIGTERM, -signal.SIGINT, -signal.SIGKILL)
"""Ends of a worker that was being stopped, which need no explanation, unless it wrote a traceback before."""


def with_memory(end: WorkerEnd, cells: HeartbeatFile, progress: tuple[GroupProgress, ...]) -> WorkerEnd:
    """Return the end of a worker with its last collectives and with what it left in the heartbeat file.

    A note that cannot be of this end is left out: user code may have written anything there.
    """
    note, (_, step) = cells.note(end.slot), cells.read(end.slot)
    if note is not None and not 0 < note.at_boottime_s <= end.at_boottime_s:
        note = None
    return replace(end, note=note, step=step, has_left=cells.left(end.slot), progress=progress)


def protocol_failure(end: WorkerEnd, node_id: str) -> Failure:
    """Return the failure of a worker that the nodes exchange."""
    found = end.failure()
    return Failure(
        FailureKind.WORKER,
        found.summary(node_id)[:512],
        found.tail[-4096:],
        slot=end.slot,
        returncode=end.returncode,
        signature=found.signature,
        error=found.message[:512],
    )


def worker_report(end: WorkerEnd, stopped_s: float | None, stdout: str | None) -> WorkerReport:
    """Return what a node reports of the end of a worker; its rank is counted from that of the node's first worker.

    Args:
        end: with what is in its files, if it failed.
        stopped_s: when the agent began to stop the workers (CLOCK_BOOTTIME); None: it did not.
        stdout: as in the report.
    """
    offset_s, failed_s = time.time() - boottime_s(), _failed_s(end)
    end = _by_itself(end, failed_s, stopped_s)
    failure = end.failure() if end.returncode != 0 else None
    # A worker may have failed just before its agent stopped it because of what this caused elsewhere. That SIGINT ended
    # it shows that its last exception was the KeyboardInterrupt.
    if failure is not None and end.stopping and end.returncode in ENDED_BY_STOP:
        failure = failure if failure.message and end.returncode != -signal.SIGINT else None
    return WorkerReport(
        end.slot,
        end.slot,
        _state(end),
        end.pid,
        end.returncode,
        end.at_boottime_s + offset_s,
        stdout=stdout and without_surrogates(stdout)[:512],
        step=end.step or None,
        progress=end.progress,
        origin=end.errors[-1] if len(end.errors) > 1 else "",
        failed_s=failed_s + offset_s,
        **(failure_fields(failure) if failure is not None else {}),
    )


def read_ends(
    context: WorkerContext, ends: Iterable[WorkerEnd], stopped_s: float | None
) -> events.GenerationEnded:
    """Return how each worker of a generation ended; ``stopped_s`` as in :func:`worker_report`. May block as long as
    a file system hangs."""
    reports = tuple(
        worker_report(context.with_files(end), stopped_s, context.output_file(end.slot)) for end in ends
    )
    found = context.machine_facts() if any(map(_is_failure, reports)) else {}
    shown = frozenset(report.slot for report in reports if not context.stderrs[report.slot])
    return events.GenerationEnded(context.generation, reports, found, shown)


def _is_failure(report: WorkerReport) -> bool:
    """Return whether the worker failed, before its agent stopped it or while it did."""
    is_failed = report.state is WorkerState.FAILED or bool(report.error)
    return is_failed or report.returncode not in ENDED_BY_STOP


def has_not_saved(report: WorkerReport, signum: signal.Signals | None) -> bool:
    """Return whether a worker that got this signal failed, or was killed, instead of ending because of it."""
    if signum is None or report.state is not WorkerState.STOPPED or report.returncode == 128 + signum:
        return False
    return bool(report.error) or report.returncode not in (0, -signum)


def warn_of_unsaved(node_id: str, reports: Iterable[WorkerReport], signum: signal.Signals | None) -> None:
    """Log which worker was to save and exit on a signal, and failed instead or was killed; and how many others."""
    unsaved = [report for report in reports if has_not_saved(report, signum)]
    if not unsaved or signum is None:
        return
    first, others = unsaved[0], len(unsaved) - 1
    error = f": {first.error}" if first.error else ""
    who = f"it and {count(others, 'other worker')} of this node" if others else "it"
    get_logger().warning(
        f"worker {node_id}/{first.slot} {ending(first.returncode or 0)} after {signum.name}{error}; {who} "
        "may not have saved"
    )


def log_cleanup(report: SweepReport) -> None:
    """Log which shared memory that workers had left was removed, or kept and why."""
    log = get_logger()
    if report.removed:
        log.info("removed shared memory left behind by workers", files=report.removed)
    for held in report.held:
        log.warning(
            f"kept shared memory of the workers: {held.file} is in use by {held.process} ({held.pid})"
        )


def _state(end: WorkerEnd) -> WorkerState:
    if end.stopping:
        return WorkerState.STOPPED
    return WorkerState.SUCCEEDED if end.returncode == 0 else WorkerState.FAILED


def failure_fields(failure: WorkerFailure) -> dict[str, Any]:
    """Return what a report contains of a worker's failure."""
    found = failure.recognised
    return {
        "error": failure.error[:512],
        "last_line": failure.last_line,
        "tail": failure.tail[-4096:],
        "signature": failure.signature,
        "line": failure.line,
        "known": found.name if found is not None else "",
        "reason": found.reason.name if found is not None and found.reason is not None else "",
        "evidence": found.evidence if found is not None else "",
        "peer": found.peer[:512] if found is not None else "",
        "peer_rank": found.rank if found is not None else None,
    }


def _failed_s(end: WorkerEnd) -> float:
    """Return when its script ended, or its process if that was killed or crashed after the script."""
    has_crashed = end.returncode < 0 and (end.note is None or not end.note.code)
    return end.note.at_boottime_s if end.note is not None and not has_crashed else end.at_boottime_s


def _by_itself(end: WorkerEnd, failed_s: float, stopped_s: float | None) -> WorkerEnd:
    """Return the end as it would have been without the agent's stop, if the script had ended before.

    That is so for a worker that had failed before the agent began to stop it, and for one whose script had ended in
    order before it was killed.
    """
    if end.stopping and end.returncode == -signal.SIGKILL and end.note is not None and end.note.code == 0:
        return replace(end, returncode=0)
    if not end.stopping or stopped_s is None or failed_s >= stopped_s:
        return end
    if end.note is None:
        return replace(end, stopping=False)
    return end if end.note.code is None else replace(end, returncode=end.note.code, stopping=False)


def start_failure(node_id: str, error: str, slot: int | None = None) -> Failure:
    """Return the failure of a node whose workers cannot be started."""
    return Failure(FailureKind.START, f"{node_id} could not start its workers: {error}"[:512], slot=slot)
