"""The agent's log: readable on a terminal, JSON lines elsewhere; each line carries run, node and generation.

A process calls ``configure_logging`` once, then ``get_logger()`` and ``bind_context`` from any thread.
``WaitingReporter`` is for waits that a person may be watching.
"""

from __future__ import annotations

from elastic_agent.logs.live import StatusLine, WaitingReporter
from elastic_agent.logs.setup import (
    adopt_library_loggers,
    bind_context,
    configure_logging,
    get_logger,
    is_console,
    log_beside_program,
    waiting_reporter,
)

__all__ = [
    "StatusLine",
    "WaitingReporter",
    "adopt_library_loggers",
    "bind_context",
    "configure_logging",
    "get_logger",
    "is_console",
    "log_beside_program",
    "waiting_reporter",
]
