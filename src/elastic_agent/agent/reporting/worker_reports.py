"""What a node reports about its workers while they run."""

from __future__ import annotations

from elastic_agent.agent.worker_group.collectives import WorkerCollectives
from elastic_agent.agent.worker_group.stalls import Progress
from elastic_agent.diagnosis.records import WorkerReport, WorkerState
from elastic_agent.linux import read_process


def present_workers(progress: Progress, first_rank: int) -> tuple[WorkerReport, ...]:
    """Return the workers of a generation that runs, by slot; in detail where they are if they make no progress."""
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
    return tuple(report for _, report in sorted({**running, **exited}.items()))


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
        optimizer_steps=progress.optimizer_steps.get(slot) or None,
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
