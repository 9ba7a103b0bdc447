"""After a generation's last process: what it left is removed before the next generation starts.

A thread does what may take long: inspecting what the processes hold while they live, which is the only time it can
be seen, and removing it when they are gone.
"""

from __future__ import annotations

import contextlib
import math
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from elastic_agent import linux
from elastic_agent.workers.cleanup.gpu_memory import GpuHolder, GpuMemory
from elastic_agent.workers.cleanup.shm_cleanup import SharedMemorySweep, SweepReport

FIRST_LOOK_S, LOOK_EVERY_S = 0.5, 10.0
"""Pauses between inspections of the processes, which double each time."""

SHORTEST_PAUSE_S, PAUSE_PER_LOOK = 0.02, 10.0
"""Between inspections because files appeared: at least this, and this many times the duration of the last one."""

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
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._bell: socket.socket | None = None
        """Rings when there is a job."""

    def started(self, pids: Iterable[int]) -> None:
        """The workers run: inspect their processes from time to time, and when shared memory appears."""
        self._pids |= {*pids}
        self._sweep.belong(self._pids)
        self._put(self._gpu.prepare)
        self._bell, bell = socket.socketpair()
        self._bell.setblocking(False)
        threading.Thread(target=self._run, args=(bell,), name="cleanup", daemon=True).start()

    def inspect(self) -> None:
        """They are about to be stopped: inspect what they hold, while they still do."""
        self._put(self._note)

    @property
    def nothing_to_do(self) -> bool:
        """Whether all processes are gone and nothing is to be removed. Fast: it lists /dev/shm once."""
        return not self._pids or not (self._gpu.there or self._sweep.candidates())

    def clear(self, done: Callable[[Cleared], None], unkillable: Collection[int] = ()) -> None:
        """Remove what is left, and call `done` from the thread. `unkillable`: processes that stay."""
        self._put(lambda: done(self._cleared({*unkillable})))
        self.close()

    def close(self) -> None:
        """There is nothing more to do."""
        self._jobs.put(None)
        if self._bell is not None:
            self._bell.close()  # which the thread notices

    def _put(self, job: _Job | None) -> None:
        self._jobs.put(job)
        if self._bell is not None:
            with contextlib.suppress(OSError):  # rung often enough, or the thread has ended
                self._bell.send(b".")

    def _run(self, bell: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(bell)
            watch = self._watch(stack)
            self._see()  # what was made before there was a watch
            pause_s, calm_at_s = FIRST_LOOK_S, 0.0
            look_at_s = time.monotonic() + pause_s
            while self._work_off_jobs():
                now_s = time.monotonic()
                if now_s >= look_at_s:
                    self._note(linux.family(self._guard_pid))
                    pause_s = min(2 * pause_s, LOOK_EVERY_S)
                    look_at_s = now_s + pause_s
                is_calm = now_s >= calm_at_s
                watched = [bell.fileno()]
                if is_calm and watch is not None:
                    watched.append(watch.fileno())
                due_s = look_at_s if is_calm else min(look_at_s, calm_at_s)
                ready = _readable(watched, due_s - time.monotonic())
                if bell.fileno() in ready:
                    bell.recv(4096)
                if watch is not None and watch.fileno() in ready:
                    watch.drain()
                    calm_at_s = self._see()

    def _work_off_jobs(self) -> bool:
        """Whether there may be others."""
        with contextlib.suppress(queue.Empty):
            while (job := self._jobs.get_nowait()) is not None:
                job()
            return False
        return True

    def _watch(self, stack: contextlib.ExitStack) -> linux.FolderWatch | None:
        """None if the kernel has no inotify watch left: then files are found at the timed inspections."""
        try:
            return stack.enter_context(contextlib.closing(linux.FolderWatch(self._sweep.folder)))
        except OSError:
            return None

    def _see(self) -> float:
        """Files may have appeared. Returns the earliest time of the next inspection, to bound the time spent."""
        began_s = time.monotonic()
        if self._sweep.has_unseen:
            self._note()
        now_s = time.monotonic()
        return now_s + max(SHORTEST_PAUSE_S, PAUSE_PER_LOOK * (now_s - began_s))

    def _note(self, alive: set[int] | None = None) -> None:
        if alive is None:
            alive = {process.pid for process in linux.descendants(self._guard_pid)}
        self._pids |= alive
        self._sweep.note(alive)

    def _cleared(self, unkillable: set[int]) -> Cleared:
        shared_memory = self._sweep.sweep(SWEEP_LIMIT_S)
        if shared_memory.held:
            # The spawner and its standbys are no generation's: what they hold is neither left nor in the way.
            waiting = {process.pid for process in linux.descendants(self._guard_pid)} - unkillable
            held = tuple(one for one in shared_memory.held if one.pid not in waiting)
            shared_memory = replace(shared_memory, held=held)
        return Cleared(shared_memory, tuple(self._gpu.await_release(self._pids, GPU_LIMIT_S)))


def _readable(fds: list[int], timeout_s: float) -> set[int]:
    """Not with `select`, which supports no descriptor above 1023: a store's host may have many connections."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(max(0, math.ceil(1000 * timeout_s)))}
