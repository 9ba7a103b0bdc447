"""When workers began to end, which is some milliseconds before they have ended.

A process that is killed, or that calls ``_exit``, has ended only after the kernel has freed its memory, which takes
5 to 100 ms for one that has loaded torch. Meanwhile another worker may fail, too. The threads of the process end at
once, except for the last one, which frees the memory.

If the kernel may be asked to, it dates the end of the main thread itself (:mod:`.exit_moments`). Otherwise, Linux 6.9
and newer tell when a thread ends (``PIDFD_THREAD``), and it is enough to watch two of them; where the processors are
busy, this comes some milliseconds late. With an older one, the end of the process is all that is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Mapping

from elastic_agent.linux import boottime_s, is_ending, threads

from .exit_moments import ExitMoment

WATCHED_THREADS = 2
AFTER_S = 0.25
"""How long after its introduction the threads of a worker are looked for: the process group has some of its own."""

_PIDFD_THREAD = os.O_EXCL


class EarlyEnds:
    """When workers of one generation began to end. For the agent's loop."""

    def __init__(self) -> None:
        """Watch nothing yet."""
        self._ends_s: dict[int, float] = {}
        self._fds: dict[int, list[int]] = {}
        self._timers: list[asyncio.TimerHandle] = []
        self._moments: dict[int, ExitMoment] = {}
        self._lock = threading.Lock()
        """Held by those who add to these or close them."""
        self._closed = False

    def date(self, pids: Mapping[int, int]) -> threading.Thread:
        """Have the kernel date the ends of these workers (slot → pid), which have just been started.

        In the thread that is returned: the first request on a machine takes 7 ms, in which the kernel waits for all
        processors.
        """
        thread = threading.Thread(target=self._date, args=(dict(pids),), name="exit-moments", daemon=True)
        thread.start()
        return thread

    def _date(self, pids: Mapping[int, int]) -> None:
        for slot, pid in pids.items():
            with contextlib.suppress(OSError):  # the kernel refuses it, or the worker is gone
                moment = ExitMoment(pid)
                with self._lock:
                    if self._closed:
                        moment.close()
                    else:
                        self._moments[slot] = moment

    def watch(self, slot: int, pid: int) -> None:
        """Watch this worker, which has made its first process group just now, unless the kernel dates its end."""
        if slot not in self._fds:
            self._fds[slot] = []
            self._timers.append(asyncio.get_running_loop().call_later(AFTER_S, self._open, slot, pid))

    def began_s(self, slot: int, ended_s: float) -> float:
        """When a worker that had ended at ``ended_s`` began to end (CLOCK_BOOTTIME); the same if that is not known."""
        return min(self._ends_s.get(slot, ended_s), ended_s)

    def close(self) -> None:
        """Watch no more; what is known remains."""
        with self._lock:
            self._closed = True
            for slot, moment in self._moments.items():
                at_s = moment.at_boottime_s
                if at_s is not None:
                    self._ends_s[slot] = at_s
                moment.close()
            self._moments.clear()
        for timer in self._timers:
            timer.cancel()
        for fds in self._fds.values():
            while fds:
                self._close(fds.pop())

    def _open(self, slot: int, pid: int) -> None:
        if slot in self._moments:
            return
        oldest = [tid for tid in sorted(threads(pid)) if tid != pid][:WATCHED_THREADS]
        if len(oldest) < WATCHED_THREADS:  # the only one may be the last one
            return
        for tid in oldest:
            with contextlib.suppress(OSError):  # it has just ended, or the kernel is too old
                fd = os.pidfd_open(tid, _PIDFD_THREAD)
                self._fds[slot].append(fd)
                asyncio.get_running_loop().add_reader(fd, self._ended(slot, pid, fd))

    def _ended(self, slot: int, pid: int, fd: int) -> Callable[[], None]:
        def ended() -> None:
            at_s = boottime_s()
            if is_ending(pid):  # else the thread has ended by itself
                self._ends_s[slot] = min(at_s, self._ends_s.get(slot, at_s))
            self._fds[slot].remove(fd)
            self._close(fd)

        return ended

    @staticmethod
    def _close(fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
