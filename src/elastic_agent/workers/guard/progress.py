"""Determines whether processes that have received SIGTERM still do something, and so how long a grace period helps.

A worker whose handler saves a checkpoint computes, fills memory, reads and writes, or has a thread or a child do so. A
worker whose main thread waits for a dead peer does none of these, in or outside of a handler, and never will: Python
runs handlers in the main thread only. What a process has done between two looks is

- clear: it read, wrote or took more memory, or a thread waits for a disk;
- unclear: it used the processor and nothing else, as a computation does, and a thread that spins until a GPU is done;
- nothing: it waits, for a lock, the network or a timer. A thread that waits for a processor is not held responsible for
  that.

Unclear activity counts for `UNCLEAR_S` in a row, and not at all in a process which the signal would end now: an
interpreter that ends has reset its handlers, and takes up to seconds to free what it has imported. (Its memory does not
grow by that, although it breaks up pages that it shares with the spawner, which is why page faults are not counted.)
Small activity in the background (threads that poll, heartbeats) counts as nothing.
"""

from __future__ import annotations

from elastic_agent import linux

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from elastic_agent.linux import Process

LOOK_EVERY_S = 0.01

UNCLEAR_S = 1.0
"""The time for which a process may do only what a spinning or hanging one does as well."""

_BUSY_SHARE = 0.05
"""A share of a processor: threads that poll use less (gloo's, every 10 ms: 0.2 %)."""

_LONGEST_INTERVAL_S = 0.02
"""The longest time that one look counts for: if the guard got no processor meanwhile, workers may have got none
either."""

_CLEAR_BYTES = 64 * 1024
"""Read, written or taken as memory."""


class StopProgress:
    """The activity of the processes of a generation since a signal.

    Make it just before the signal is sent. `workers` are the processes that get it; those that ignore it are not
    awaited. `remaining` lists all processes of the generation; that takes a while, so it is not called before. Of those
    that are no workers, the ones count that a handler has started, and those that were sent SIGTERM themselves
    (`is_terminated`): a data loader that goes on does not save. `now`: by time.monotonic().
    """

    def __init__(
        self,
        workers: Collection[int],
        signum: int,
        idle_s: float,
        remaining: Callable[[], list[Process]],
        is_terminated: Callable[[Process], bool],
        now: float,
    ) -> None:
        self._idle_limit_s = idle_s
        self._unclear_limit_s = max(UNCLEAR_S, idle_s)
        self._remaining = remaining
        self._is_terminated = is_terminated
        self._idle_s = 0.0
        self._looked_at = now
        self._ignoring = {pid for pid in workers if linux.ignores(pid, signum)}
        self._signalled_at_s = linux.boottime_s()
        self._looked = False
        self._known = {  # by process id
            pid: _Activity(pid, signum) for pid in workers if pid not in self._ignoring
        }

    def look(self, now: float) -> bool:
        """Return whether to go on waiting at `now`, by time.monotonic()."""
        elapsed_s = now - self._looked_at
        self._looked_at = now
        if not self._looked:  # most workers have ended by now, so that nothing is to be listed
            self._looked = True
            self._found_more()
        if self._any_progress(elapsed_s):
            self._idle_s = 0.0
            return True
        self._idle_s += min(elapsed_s, _LONGEST_INTERVAL_S)
        if self._idle_s < self._idle_limit_s:
            return True
        if self._found_more():
            self._idle_s = 0.0
            return True
        return False

    def _any_progress(self, elapsed_s: float) -> bool:
        active = [activity for activity in self._known.values() if activity.used(elapsed_s)]
        if any(self._counts(activity) for activity in active):
            return True
        idle = [activity for activity in self._known.values() if activity not in active]
        shown = [activity for activity in idle if activity.threads_show()]
        return any(self._counts(activity) for activity in shown)

    def _counts(self, activity: _Activity) -> bool:
        return activity.unclear_s < self._unclear_limit_s

    def _found_more(self) -> bool:
        """Add processes that count and were not known; return whether there were any."""
        before = len(self._known)
        for process in self._remaining():
            if (
                process.pid not in self._known
                and process.pid not in self._ignoring
                and (linux.started_after(process, self._signalled_at_s) or self._is_terminated(process))
            ):
                self._known[process.pid] = _Activity(process.pid, None)
        return len(self._known) > before


class _Activity:
    """The activity of one process. `handled`: the signal for which a worker has a handler until it ends."""

    def __init__(self, pid: int, handled: int | None) -> None:
        self.unclear_s = 0.0
        """The time for which it has done nothing clear, and something unclear."""
        self._pid = pid
        self._handled = handled
        self._seen = _counters(pid) or (0.0, 0, 0)
        self._moved = 0
        """Bytes since the last clear activity."""

    def used(self, elapsed_s: float) -> bool:
        """Return whether it used the processor, memory or files since the last look."""
        now = _counters(self._pid)
        if now is None:
            return False
        used_s, transferred, grown = (after - before for after, before in zip(now, self._seen, strict=True))
        self._seen = now
        self._moved += int(transferred + max(0, grown))
        if self._moved >= _CLEAR_BYTES:
            self._moved = 0
            self.unclear_s = 0.0
            return True
        if used_s < _BUSY_SHARE * min(elapsed_s, _LONGEST_INTERVAL_S) or self._ends():
            return False
        self.unclear_s += min(elapsed_s, used_s)
        return True

    def _ends(self) -> bool:
        return self._handled is not None and linux.ends_by(self._pid, self._handled)

    def threads_show(self) -> bool:
        """Return whether its threads show that it does something, although it used nothing."""
        states = {linux.thread_state(tid) for tid in linux.threads(self._pid)}
        if "D" in states:
            self.unclear_s = 0.0
            return True
        return "R" in states and not self._ends()


def _counters(pid: int) -> tuple[float, int, int] | None:
    """Return the seconds of the processor; bytes read and written; bytes of memory. None when the process is gone."""
    try:
        return linux.cpu_time_s(pid), linux.transferred_bytes(pid), linux.resident_bytes(pid)
    except OSError:
        return None
