"""Implements :func:`elastic_agent.client.notice` and :func:`elastic_agent.client.leave`."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from elastic_agent.client._heartbeat import Pulse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

# The words of a cell, see elastic_agent.client._cells. Not defined there, because that loads mmap.
NOTICE, CAUSE, DEADLINE_NS, LOOKS, LEFT = 2, 3, 4, 5, 6
CAUSES = ("preempted", "walltime", "drain", "grow", "operator")
"""Why workers get a notice that they will be stopped; the word in the cell counts from 1."""


@dataclass(frozen=True, kw_only=True)
class Notice:
    """All workers of this world will be stopped: why, and by when."""

    reason: str
    """'preempted' or 'walltime': the whole run is stopped, to be resumed later; 'drain': a node leaves and the others
    continue without it; 'grow': a node joins; 'operator': an operator stops the run."""
    deadline: float
    """When workers that have not exited yet are stopped, in seconds of Unix time (time.time()), by the clock as it
    stood when this notice was first seen."""
    deadline_boottime: float
    """The same in seconds of CLOCK_BOOTTIME, which is independent of changes of the clock."""

    @property
    def seconds_left(self) -> float:
        """The time until the deadline, whatever happens to the clock; never less than 0."""
        return max(0.0, self.deadline_boottime - time.clock_gettime(time.CLOCK_BOOTTIME))

    @classmethod
    def due(cls, reason: str, left_s: float) -> Notice:
        """Make a notice that is seen now, with so much time left."""
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        return cls(reason=reason, deadline=time.time() + left_s, deadline_boottime=now_s + left_s)


class NoticeBoard:
    """This process's view of its agent's notices."""

    __slots__ = ("_agreed", "_newest", "_pulse", "_serial")

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._serial = 0
        self._newest: Notice | None = None
        self._agreed = 0

    def current(self) -> Notice | None:
        """Return the newest notice."""
        words = self._pulse.words
        serial = words[NOTICE]
        if serial != self._serial:
            self._newest = _read(words) if serial else None
            self._serial = serial
        elif not words[LOOKS]:
            words[LOOKS] = 1
        return self._newest

    def numbered(self) -> tuple[int, Notice | None]:
        """Return the newest notice with its serial number, 0 for none."""
        newest = self.current()
        return self._serial, newest

    def agreed(self, serial: int) -> None:
        """Take note that all workers know of this notice, whether it has been seen here or not."""
        self._agreed = max(self._agreed, serial)

    def leave(self) -> NoReturn:
        """Report that this worker saved, and end it."""
        words = self._pulse.words
        words[LEFT] = max(words[NOTICE], self._agreed)
        sys.exit(0)


def _read(words: memoryview) -> Notice:
    left_s = words[DEADLINE_NS] / 1e9 - time.clock_gettime(time.CLOCK_BOOTTIME)
    return Notice.due(CAUSES[words[CAUSE] - 1], left_s)
