"""What a node reports about its workers while they run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from elastic_agent.agent.worker_group.collectives import WorkerCollectives
from elastic_agent.agent.worker_group.stalls import Progress
from elastic_agent.diagnosis.records import Usage, WorkerReport, WorkerState
from elastic_agent.linux import cpu_time_s, read_process, resident_bytes

from .gpu_usage import GpuShare, GpuUsage


class WorkerUsage:
    """What the processes of the workers take of the machine; a look takes some microseconds for each."""

    def __init__(self, gpus: GpuUsage | None = None) -> None:
        self._gpus = gpus or GpuUsage()
        self.by_slot: dict[int, Usage] = {}
        self._seen: dict[int, tuple[float, float]] = {}
        """When each process was looked at last, and the processor time that it had used."""

    def look(self, pids: Mapping[int, int], now_s: float) -> None:
        """Look at these processes, by slot; ``now_s``: by a clock that does not jump."""
        before, self._seen, self.by_slot = self._seen, {}, {}
        self._gpus.ask()  # the answer comes with the next look
        for slot, pid in pids.items():
            with contextlib.suppress(OSError):  # it has ended
                used_s, memory = cpu_time_s(pid), resident_bytes(pid)
                at_s, before_s = before.get(pid, (now_s, used_s))
                cpu = max(0.0, used_s - before_s) / (now_s - at_s) if now_s > at_s else None
                gpu = self._gpus.by_pid.get(pid, GpuShare(None, 0))
                self.by_slot[slot] = Usage(cpu, memory, gpu.busy, gpu.memory_bytes or None)
                self._seen[pid] = now_s, used_s


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
