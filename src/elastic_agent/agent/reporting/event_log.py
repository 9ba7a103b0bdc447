"""A record of everything that happened, one JSON object a line, for tests and post-mortems."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from elastic_agent.linux import boottime_s
from elastic_agent.logs import get_logger


class EventLog:
    """Appends events to a file with one write each, so that several agents may share it."""

    def __init__(self, path: Path | None, **context: Any) -> None:
        """``path`` None records nothing; ``context`` goes into every line.

        Raises:
            OSError: the file cannot be opened for writing.
        """
        self._context = context
        self._handle: int | None = None
        self._told = False
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            # The loop must not wait for the reader of a FIFO, neither here nor when it writes.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
            self._handle = os.open(path, flags, 0o644)

    def bind(self, **context: Any) -> None:
        """Add to what goes into every line from now on."""
        self._context.update(context)

    def write(self, event: str, **details: Any) -> None:
        """One event, stamped with CLOCK_BOOTTIME and the time of day; lost where it cannot be written (disk full)."""
        if self._handle is None:
            return
        line = {"event": event, "boottime_s": boottime_s(), "time_s": time.time(), **self._context, **details}
        try:
            os.write(self._handle, (json.dumps(line, default=str) + "\n").encode())
        except OSError as error:  # the run matters more than its record
            if not self._told:
                self._told = True
                get_logger().warning(
                    "cannot write the event journal; some events are missing from it", error=str(error)
                )

    def close(self) -> None:
        """Close the file."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
