"""Removes what a generation left after its last process, before the next generation starts.

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
from dataclasses import replace

from elastic_agent import linux
from elastic_agent.workers.cleanup.shm_cleanup import SharedMemorySweep, SweepReport

INSPECT_EVERY_S = 5.0
"""Pause between two inspections of what the processes hold."""

CLEANUP_LIMIT_S = 2.0
"""The next generation does not wait longer."""

SWEEP_LIMIT_S = 1.0

_Job = Callable[[], None]


class Cleanup:
    """The cleanup after one generation. Made before its processes are started, used up when it is cleared."""

    def __init__(self, guard_pid: int, sweep: SharedMemorySweep | None = None) -> None:
        """``guard_pid``: of the process from which all of the generation descend; ``sweep``: of /dev/shm."""
        self._guard_pid = guard_pid
        self._sweep = sweep or SharedMemorySweep()
        self._has_started = False
        self._files: frozenset[str] = frozenset()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    def started(self) -> None:
        """Begin to inspect, from time to time, what the processes of the workers hold."""
        self._has_started = True
        threading.Thread(target=self._run, name="cleanup", daemon=True).start()

    def inspect(self) -> None:
        """Inspect what the processes hold that are about to be stopped, while they still do."""
        self._jobs.put(self._inspect)

    def remove(self, files: Iterable[str]) -> None:
        """Have these files removed too when it is cleared; they may be on a file server."""
        self._files = frozenset(files)

    @property
    def nothing_to_do(self) -> bool:
        """True if all processes are gone and nothing is to be removed. Fast: it lists /dev/shm once."""
        return not self._has_started or not (self._files or self._sweep.candidates())

    def clear(self, done: Callable[[SweepReport], None], unkillable: Collection[int] = ()) -> None:
        """Remove what is left, and call `done` from the thread. `unkillable`: processes that stay."""
        until_s = time.monotonic() + CLEANUP_LIMIT_S
        self._jobs.put(lambda: done(self._cleared({*unkillable}, until_s)))
        self.close()

    def close(self) -> None:
        """End the thread: there is nothing more to do."""
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
        if self._sweep.has_unseen:
            self._sweep.note(linux.family(self._guard_pid))

    def _cleared(self, unkillable: set[int], until_s: float) -> SweepReport:
        for file in self._files:
            if time.monotonic() < until_s:  # later, it may be the next generation's
                with contextlib.suppress(OSError):
                    os.unlink(file)
        report = self._sweep.sweep(SWEEP_LIMIT_S)
        if report.held:
            # The spawner and its standbys are no generation's: what they hold is neither left nor in the way.
            waiting = {process.pid for process in linux.descendants(self._guard_pid)} - unkillable
            return replace(report, held=tuple(holder for holder in report.held if holder.pid not in waiting))
        return report
