"""The agent's log: readable on a terminal, JSON lines elsewhere; each line carries run, node and generation.

A process calls ``configure_logging`` once, then ``get_logger()`` and ``bind_context`` from any thread.
``WaitingReporter`` logs what is waited for.
"""

from __future__ import annotations

from elastic_agent.logs.setup import (
    adopt_library_loggers,
    bind_context,
    configure_logging,
    get_logger,
    is_console,
    log_beside_program,
)
from elastic_agent.logs.waiting import WaitingReporter

__all__ = [
    "WaitingReporter",
    "adopt_library_loggers",
    "bind_context",
    "configure_logging",
    "get_logger",
    "is_console",
    "log_beside_program",
]
