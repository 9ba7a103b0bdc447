"""Logs what a process waits for, in sparse lines."""

from __future__ import annotations

import time
from collections.abc import Callable

_CHANGE_GAP_S = 1.0
_LOG_AFTER_S = (10.0, 30.0, 60.0)
_LOG_EVERY_S = 60.0


class WaitingReporter:
    """Logs what is waited for, and for how long already. Whoever waits calls ``update`` about once a second.

    It is logged at 0, 10, 30 and 60 s, then every 60 s, and when the topic changes (at most once a second, however many
    nodes arrive).

    Args:
        log: called with the text and the field ``waited_s``, e.g. ``get_logger().info``.
        clock: seconds of a clock that never goes back.
    """

    def __init__(self, log: Callable[..., object], clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._since_s: float | None = None
        self._due_s = self._told_s = 0.0
        self._told_topic = ""

    def update(self, text: str, topic: str = "", already_s: float = 0.0) -> None:
        """Log what is waited for now, if that is due.

        Args:
            text: the sentence to log.
            topic: what of it is worth a log line when it changes.
            already_s: for how long it was waited for before the first update, seconds.
        """
        now_s = self._clock()
        if self._since_s is None:
            self._since_s, self._due_s = now_s - already_s, now_s
        waited_s = now_s - self._since_s
        is_news = topic != self._told_topic and now_s - self._told_s >= _CHANGE_GAP_S
        if now_s >= self._due_s or is_news:
            self._log(text, waited_s=round(waited_s, 1))
            self._told_s, self._told_topic = now_s, topic
            later_s = (after_s for after_s in _LOG_AFTER_S if after_s > waited_s)
            self._due_s = self._since_s + next(later_s, _LOG_EVERY_S * (waited_s // _LOG_EVERY_S + 1))

    def clear(self) -> None:
        """End the wait; the next ``update`` starts a new one."""
        self._since_s = None
