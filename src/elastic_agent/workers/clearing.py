"""After a generation's last process: what it left is removed before the next generation starts.

A thread does what may take long: looking at what the processes hold while they live, which is the only time it
can be seen, and clearing away when they are gone.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from elastic_agent.workers import _linux
from elastic_agent.workers.gpu_memory import GpuHolder, GpuMemory
from elastic_agent.workers.leftovers import SharedMemorySweep, SweepReport

__all__ = ["CLEAR_LIMIT_S", "Cleared", "Clearing"]

FIRST_LOOK_S, LOOK_EVERY_S = 0.5, 10.0
"""Pauses between looks, which double from one to the other: most of what workers share is made early.

A file that is made and held only between two looks, and whose holder nobody had time to look at when it ended,
stays behind.
"""

CLEAR_LIMIT_S = 2.0
"""The next generation does not wait longer."""

GPU_LIMIT_S = 0.9
SWEEP_LIMIT_S = 1.0

_Job = Callable[[], None]


@dataclass(frozen=True)
class Cleared:
    """What the sweep found, and who still has memory on a GPU."""

    shared_memory: SweepReport = field(default_factory=SweepReport)
    gpu: tuple[GpuHolder, ...] = ()


class Clearing:
    """One generation's. Made before its processes are started, used up when it is cleared.

    Args:
        guard_pid: All processes of the generation descend from it.
        gpu: The GPUs, used here in one thread at a time.
        sweep: What looks after /dev/shm.
    """

    def __init__(self, guard_pid: int, gpu: GpuMemory, sweep: SharedMemorySweep | None = None) -> None:
        self._guard_pid = guard_pid
        self._gpu = gpu
        self._sweep = sweep or SharedMemorySweep()
        self._pids: set[int] = set()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    def started(self, pids: Iterable[int]) -> None:
        """The workers run; from now on their processes are looked at now and then."""
        self._pids |= {*pids}
        self._sweep.belong(self._pids)
        self._jobs.put(self._gpu.prepare)
        threading.Thread(target=self._run, name="clearing", daemon=True).start()

    def look(self) -> None:
        """They are about to be stopped: see what they hold, while they still do."""
        self._jobs.put(self._note)

    @property
    def nothing_to_do(self) -> bool:
        """All processes are gone, and there is nothing to clear. Fast: one look at /dev/shm."""
        return not self._pids or not (self._gpu.there or self._sweep.candidates())

    def clear(self, done: Callable[[Cleared], None], unkillable: Collection[int] = ()) -> None:
        """Clear away, and call `done` from the thread. `unkillable`: those of the processes that stay."""
        self._jobs.put(lambda: done(self._cleared({*unkillable})))
        self._jobs.put(None)

    def close(self) -> None:
        """There is nothing to clear."""
        self._jobs.put(None)

    def _run(self) -> None:
        pause_s = FIRST_LOOK_S
        while True:
            try:
                job = self._jobs.get(timeout=pause_s)
            except queue.Empty:
                job = self._note
                pause_s = min(2 * pause_s, LOOK_EVERY_S)
            if job is None:
                return
            job()

    def _note(self) -> None:
        living = {process.pid for process in _linux.descendants(self._guard_pid)}
        self._pids |= living
        self._sweep.note(living)

    def _cleared(self, unkillable: set[int]) -> Cleared:
        shared_memory = self._sweep.sweep(SWEEP_LIMIT_S)
        if shared_memory.held:
            # The spawner and its standbys are no generation's: what they hold is neither left nor in the way.
            waiting = {process.pid for process in _linux.descendants(self._guard_pid)} - unkillable
            held = tuple(one for one in shared_memory.held if one.pid not in waiting)
            shared_memory = replace(shared_memory, held=held)
        return Cleared(shared_memory, tuple(self._gpu.await_release(self._pids, GPU_LIMIT_S)))
