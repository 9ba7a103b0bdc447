"""Shows what a process waits for: a line that is rewritten in place on a terminal, sparse log lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import TextIO

from elastic_agent.printable import duration

_ERASE_LINE = "\r\x1b[K"
_CHANGE_GAP_S = 1.0
_LOG_AFTER_S = (10.0, 30.0, 60.0)
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
        """True if no other job of the shell has the terminal (``elastic-agent ... &``)."""
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
    """Shows what is waited for, and for how long already. Whoever waits calls ``update`` about once a second.

    With a status line the text is shown there and nothing is logged. Without one it is logged at 0, 10, 30 and 60
    s, then every 60 s, and when the topic changes (at most once a second, however many nodes arrive).

    Args:
        status: the terminal's status line, or None.
        log: called with the text and the field ``waited_s``, e.g. ``get_logger().info``.
        clock: seconds of a clock that never goes back.
    """

    def __init__(
        self, status: StatusLine | None, log: Callable[..., object], clock: Callable[[], float]
    ) -> None:
        self._line, self._log, self._clock = status, log, clock
        self._is_shared = False
        self._since_s: float | None = None
        self._due_s = self._told_s = 0.0
        self._told_topic = ""

    def update(self, text: str, topic: str = "", already_s: float = 0.0) -> None:
        """Show what is waited for now, or log it if that is due.

        Args:
            text: the sentence to show.
            topic: what of it is worth a log line when it changes.
            already_s: for how long it was waited for before the first update, seconds.
        """
        now_s = self._clock()
        if self._since_s is None:
            self._since_s, self._due_s = now_s - already_s, now_s
        waited_s = now_s - self._since_s
        is_news = topic != self._told_topic and now_s - self._told_s >= _CHANGE_GAP_S
        if self._line is not None and self.is_live:
            self._line.show(text, f" ({duration(int(waited_s))})")
        elif now_s >= self._due_s or is_news:
            self._log(text, waited_s=round(waited_s, 1))
            self._told_s, self._told_topic = now_s, topic
            later_s = (after_s for after_s in _LOG_AFTER_S if after_s > waited_s)
            self._due_s = self._since_s + next(later_s, _LOG_EVERY_S * (waited_s // _LOG_EVERY_S + 1))

    def share(self, is_shared: bool) -> None:
        """Say whether others write to the terminal, such as workers: then there is no live line, which would erase the
        beginnings of their lines."""
        self._is_shared = is_shared
        if is_shared and self._line is not None:
            self._line.clear()

    @property
    def is_live(self) -> bool:
        """True if a live line shows the wait, and nothing is logged."""
        return self._line is not None and not self._is_shared and self._line.is_in_front

    @property
    def is_cut(self) -> bool:
        """True if a live line had no room for the whole text."""
        return self._line is not None and self.is_live and self._line.is_cut

    def clear(self) -> None:
        """End the wait; the next ``update`` starts a new one."""
        self._since_s = None
        if self._line is not None:
            self._line.clear()
