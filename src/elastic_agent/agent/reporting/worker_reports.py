"""What a node reports about each of its workers."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from elastic_agent.agent import events
from elastic_agent.agent.worker_group.collectives import WorkerCollectives
from elastic_agent.agent.worker_group.stalls import Progress
from elastic_agent.diagnosis.known_errors import known_error
from elastic_agent.diagnosis.records import WorkerReport, WorkerState
from elastic_agent.linux import read_process
from elastic_agent.workers.failure import WorkerFailure


def present_workers(progress: Progress, first_rank: int) -> tuple[WorkerReport, ...]:
    """The workers of a generation that runs, by slot; where they are in detail if they make no progress."""
    running = {slot: _running(progress, slot, first_rank) for slot in progress.pids}
    exited = {
        slot: WorkerReport(
            slot,
            first_rank + slot,
            WorkerState.SUCCEEDED if end.returncode == 0 else WorkerState.FAILED,
            end.pid,
            end.returncode,
        )
        for slot, end in progress.exited.items()
    }
    return tuple(one for _, one in sorted({**running, **exited}.items()))


def _running(progress: Progress, slot: int, first_rank: int) -> WorkerReport:
    pid = progress.pids[slot]
    known = progress.collectives.get(slot) or WorkerCollectives(pid)
    process = read_process(pid) if progress.stalled_s is not None else None
    return WorkerReport(
        slot,
        first_rank + slot,
        WorkerState.RUNNING,
        pid,
        step=progress.steps.get(slot) or None,
        progress=known.groups,
        process_state=process.state if process is not None else "",
        stack=known.stack,
        line=known.line,
        waits_in=known.waits_in,
        handles=known.handles,
        raised_at=known.raised_at,
        is_silent=known.is_silent,
        waits=round(known.waits, 2) if known.waits is not None else None,
    )


def ended_worker(end: events.WorkerEnd, first_rank: int) -> WorkerReport:
    """A worker of a generation that has ended."""
    failure = end.failure
    if failure is None:
        state = WorkerState.SUCCEEDED if end.returncode == 0 and not end.stopping else WorkerState.STOPPED
    else:
        state = WorkerState.STOPPED if end.stopping else WorkerState.FAILED
    report = WorkerReport(
        end.slot,
        first_rank + end.slot,
        state,
        end.pid,
        end.returncode,
        end.ended_s,
        step=end.step or None,
        progress=end.progress,
        origin=end.origin,
        failed_s=end.failed_s,
        stdout=end.stdout and end.stdout[:512],
    )
    return replace(report, **failure_fields(failure)) if failure is not None else report


def failure_fields(failure: WorkerFailure) -> dict[str, Any]:
    """What a report contains of a worker's failure."""
    error = _error(failure)
    found = failure.recognised if error == failure.message else known_error(error)
    return {
        "error": error[:512],
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


def _error(failure: WorkerFailure) -> str:
    """Its error may be missing because the disk of its output is full: then that is what has to be known first."""
    if failure.message or not failure.no_room:
        return failure.message
    return f"no space for its output: {failure.no_room}"
