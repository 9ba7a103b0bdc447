"""When a node gives up a store that does not answer, without I/O."""

from __future__ import annotations

from collections.abc import Callable

from . import events


class StoreTimeout:
    """Dial for the join time-out at most. A store that was of no use from the beginning is given up at once."""

    def __init__(
        self,
        limit_s: float,
        call_later: Callable[[float, Callable[[], None]], object],
        give_up: Callable[[str], None],
    ) -> None:
        """``limit_s``: the join time-out; ``call_later``: calls after so many seconds; ``give_up``: with the reason."""
        self._limit_s = limit_s
        self._call_later = call_later
        self._give_up = give_up
        self._was_connected = False
        self._dialling: object | None = None
        """Stands for the time since the store was lost."""
        self._reason = ""
        """What the last attempt to reach it ended with."""

    def take_in(self, event: events.SessionEvent) -> None:
        """Handle an event of the session."""
        match event:
            case events.Connected():
                self._was_connected, self._dialling = True, None
            case events.Unusable(reason=reason) if not self._was_connected:
                self._give_up(reason)
            case events.OtherVersion(reason=reason):
                self._give_up(reason)
            # An unusable store may be so only for now: its machine restarts other things first.
            case events.Disconnected(reason=reason) | events.Unusable(reason=reason):
                self._reason = reason
                if self._dialling is None:
                    self._dialling = dialling = object()
                    self._call_later(self._limit_s, lambda: self._over(dialling))

    def _over(self, dialling: object) -> None:
        if self._dialling is dialling:
            self._give_up(f"the store did not answer for {self._limit_s:g} s: {self._reason}")
