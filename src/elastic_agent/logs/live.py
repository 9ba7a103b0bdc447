"""Shows what a process waits for: a line that is rewritten in place on a terminal, sparse log lines elsewhere.

There is no thread here: the waiting code calls ``tick`` when ``next_due_s`` has come, or at any other time.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from typing import TextIO

_ERASE_LINE = "\r\x1b[K"
_REFRESH_S = 1.0
_CHANGE_GAP_S = 1.0
_LOG_AFTER_S = (0.0, 10.0, 30.0, 60.0)
_LOG_EVERY_S = 60.0
_USUAL_COLUMNS = 80
_CUT = "..."


class StatusLine:
    """A stream for log lines whose last line may be a status that stays below them. Safe for threads."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._status = ""
        self.is_cut = False
        """The terminal is too narrow for the status that was shown last."""

    def write_line(self, text: str) -> None:
        """Write a line for good, above the status."""
        with self._lock:
            if not self.is_in_front:  # stopped and continued: the last line is the shell's now
                self._status = ""
            prefix = _ERASE_LINE if self._status else ""
            self._write(f"{prefix}{text}\n{self._status}")

    def show(self, status: str, ending: str = "") -> None:
        """Replace the status by this one; if the terminal is too narrow, it is cut before the ending."""
        with self._lock:
            room = self._columns() - 1 - len(ending)
            self.is_cut = len(status) > room
            if self.is_cut:
                status = status[: max(0, room - len(_CUT))] + _CUT
            line = (status + ending)[: self._columns() - 1]
            if line != self._status:
                self._status = line
                self._write(_ERASE_LINE + line)

    @property
    def is_in_front(self) -> bool:
        """Whether no other job of the shell has the terminal (``elastic-agent ... &``)."""
        try:
            return os.tcgetpgrp(self._stream.fileno()) == os.getpgrp()
        except (OSError, ValueError, AttributeError):  # not the terminal of this session: no shell uses it
            return True

    def clear(self) -> None:
        """Remove the status."""
        with self._lock:
            if self._status and self.is_in_front:
                self._write(_ERASE_LINE)
            self._status = ""

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone: not an error
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._stream.write(text.encode("ascii", "backslashreplace").decode("ascii"))
            self._stream.flush()

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _USUAL_COLUMNS
        except (OSError, ValueError, AttributeError):
            return _USUAL_COLUMNS


class WaitingReporter:
    """Shows what is waited for, and for how long already.

    With a status line the text is shown there and nothing is logged. Without one it is logged at 0, 10, 30 and 60
    s, then every 60 s, and when the facts change (at most once a second, however many nodes arrive).

    Args:
        status: the terminal's status line, or None.
        log: called with the text and the fields ``waited_s`` and the facts, e.g. ``get_logger().info``.
        clock: seconds of a clock that never goes back.
    """

    def __init__(
        self, status: StatusLine | None, log: Callable[..., object], clock: Callable[[], float]
    ) -> None:
        self._line = status
        self._is_shared = False
        self._log = log
        self._clock = clock
        self._since_s: float | None = None
        self._text = ""
        self._facts: dict[str, object] = {}
        self._shown_facts: dict[str, object] = {}
        self._told_s = 0.0
        self._logs_due = 0  # how many of the planned log times have passed

    def update(self, text: str, facts: Mapping[str, object], already_s: float = 0.0) -> None:
        """Set what is waited for now.

        Args:
            text: the sentence to show.
            facts: the few values whose change is worth a log line, and its fields; one that is the text itself
                is not shown twice.
            already_s: for how long it was waited for before the first update, seconds.
        """
        self._text, self._facts = text, dict(facts)
        if self._since_s is None:
            self._since_s = self._clock() - already_s
            self._logs_due = 0
        self.tick()

    def share(self, is_shared: bool) -> None:
        """Say whether others write to the terminal, such as workers: then there is no live line, which would erase the
        beginnings of their lines."""
        self._is_shared = is_shared
        if is_shared and self._line is not None:
            self._line.clear()

    @property
    def _status(self) -> StatusLine | None:
        line = self._line
        return line if line is not None and not self._is_shared and line.is_in_front else None

    @property
    def is_live(self) -> bool:
        """Whether a live line shows the wait, and nothing is logged."""
        return self._status is not None

    @property
    def is_cut(self) -> bool:
        """Whether a live line had no room for the whole text."""
        return self._line is not None and self.is_live and self._line.is_cut

    def clear(self) -> None:
        """End the wait; the next ``update`` starts a new one."""
        self._since_s = None
        if self._line is not None:
            self._line.clear()

    def tick(self) -> None:
        """Show or log what is due now."""
        if self._since_s is None:
            return
        now_s = self._clock()
        if (line := self._status) is not None:
            line.show(self._text, f" ({_duration(now_s - self._since_s)})")
            self._told_s = now_s
            return
        due_s = self.next_due_s
        if due_s is not None and now_s >= due_s:
            fields = {name: value for name, value in self._facts.items() if value != self._text}
            self._log(self._text, waited_s=round(now_s - self._since_s, 1), **fields)
            self._told_s, self._shown_facts = now_s, self._facts
            while self._planned_s(self._since_s) <= now_s:
                self._logs_due += 1

    @property
    def next_due_s(self) -> float | None:
        """When ``tick`` should be called next, on the clock; None while nothing is waited for."""
        if self._since_s is None:
            return None
        if self._status is not None:
            return self._told_s + _REFRESH_S
        planned_s = self._planned_s(self._since_s)
        if self._logs_due and self._facts != self._shown_facts:
            return min(planned_s, self._told_s + _CHANGE_GAP_S)
        return planned_s

    def _planned_s(self, since_s: float) -> float:
        """Return the next of the planned log times, on the clock."""
        if self._logs_due < len(_LOG_AFTER_S):
            return since_s + _LOG_AFTER_S[self._logs_due]
        return since_s + _LOG_AFTER_S[-1] + (self._logs_due - len(_LOG_AFTER_S) + 1) * _LOG_EVERY_S


def _duration(length_s: float) -> str:
    whole = int(length_s)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
