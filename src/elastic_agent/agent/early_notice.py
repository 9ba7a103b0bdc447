"""A notice that comes while the agent still imports torch, kept until somebody can act on it. Needs no torch itself."""

from __future__ import annotations

import contextlib
import signal
from types import FrameType

from elastic_agent.config.value_types import NO_SIGNAL


class EarlyNotice:
    """Hears the notice signal, which would end the process, from the first moment on."""

    def __init__(self, name: str) -> None:
        """Hear it from now on, until the signal gets another handler.

        Args:
            name: of the signal; ``none``: there is none.
        """
        self.came = False
        """Whether the signal was heard."""
        if name != NO_SIGNAL:
            with contextlib.suppress(ValueError):  # not the main thread: signals are the caller's business
                signal.signal(signal.Signals[name], self._heard)

    def _heard(self, signum: int, frame: FrameType | None) -> None:
        self.came = True
