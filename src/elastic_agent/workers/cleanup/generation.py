"""After a generation's last process: what it left is removed before the next generation starts.

A thread does what may take long: inspecting what the processes hold while they live, which is the only time it can
be seen, and removing it when they are gone.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from elastic_agent import linux
from elastic_agent.workers.cleanup.gpu_memory import GpuHolder, GpuMemory
from elastic_agent.workers.cleanup.shm_cleanup import SharedMemorySweep, SweepReport

INSPECT_EVERY_S = 5.0
"""Pause between two inspections of what the processes hold."""

CLEANUP_LIMIT_S = 2.0
"""The next generation does not wait longer."""

GPU_LIMIT_S = 0.9
SWEEP_LIMIT_S = 1.0

_Job = Callable[[], None]


@dataclass(frozen=True)
class Cleared:
    """The result of the sweep, and the processes that still have memory on a GPU."""

    shared_memory: SweepReport = field(default_factory=SweepReport)
    gpu: tuple[GpuHolder, ...] = ()


class Cleanup:
    """One generation's. Made before its processes are started, used up when it is cleared.

    Args:
        guard_pid: All processes of the generation descend from it.
        gpu: The GPUs, used here in one thread at a time.
        sweep: Removes files from /dev/shm.
    """

    def __init__(self, guard_pid: int, gpu: GpuMemory, sweep: SharedMemorySweep | None = None) -> None:
        self._guard_pid = guard_pid
        self._gpu = gpu
        self._sweep = sweep or SharedMemorySweep()
        self._pids: set[int] = set()
        self._files: frozenset[str] = frozenset()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    def started(self, pids: Iterable[int]) -> None:
        """The workers run: inspect from time to time what their processes hold."""
        self._pids |= {*pids}
        self._sweep.belong(self._pids)
        self._jobs.put(self._gpu.prepare)
        threading.Thread(target=self._run, name="cleanup", daemon=True).start()

    def inspect(self) -> None:
        """They are about to be stopped: inspect what they hold, while they still do."""
        self._jobs.put(self._inspect)

    def remove(self, files: Iterable[str]) -> None:
        """Have these files removed too when it is cleared; they may be on a file server."""
        self._files = frozenset(files)

    @property
    def nothing_to_do(self) -> bool:
        """All processes are gone and nothing is to be removed. Fast: it lists /dev/shm once."""
        return not self._pids or not (self._files or self._gpu.there or self._sweep.candidates())

    def clear(self, done: Callable[[Cleared], None], unkillable: Collection[int] = ()) -> None:
        """Remove what is left, and call `done` from the thread. `unkillable`: processes that stay."""
        until_s = time.monotonic() + CLEANUP_LIMIT_S
        self._jobs.put(lambda: done(self._cleared({*unkillable}, until_s)))
        self.close()

    def close(self) -> None:
        """There is nothing more to do."""
        self._jobs.put(None)

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=INSPECT_EVERY_S)
            except queue.Empty:
                job = self._inspect
            if job is None:
                return
            job()

    def _inspect(self) -> None:
        if self._sweep.has_unseen or self._gpu.there:
            alive = linux.family(self._guard_pid)
            self._pids |= alive
            self._sweep.note(alive)

    def _cleared(self, unkillable: set[int], until_s: float) -> Cleared:
        for file in self._files:
            if time.monotonic() < until_s:  # later, it may be the next generation's
                with contextlib.suppress(OSError):
                    os.unlink(file)
        shared_memory = self._sweep.sweep(SWEEP_LIMIT_S)
        if shared_memory.held:
            # The spawner and its standbys are no generation's: what they hold is neither left nor in the way.
            waiting = {process.pid for process in linux.descendants(self._guard_pid)} - unkillable
            held = tuple(holder for holder in shared_memory.held if holder.pid not in waiting)
            shared_memory = replace(shared_memory, held=held)
        return Cleared(shared_memory, tuple(self._gpu.await_release(self._pids, GPU_LIMIT_S)))
