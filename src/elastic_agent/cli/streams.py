"""Standard streams that were closed (``2>&-``), as some daemons and cron jobs start programs."""

from __future__ import annotations

import sys


def open_closed_streams() -> None:
    """Have /dev/null where standard input, output or error is closed.

    To be called before anything is opened: the next file or socket would get the free number, and what is written
    to standard error, by libraries and by workers too, would go there.
    """
    if None not in (sys.stdin, sys.stdout, sys.stderr):  # Python sets those to None
        return
    from elastic_agent.workers.guard.client import open_missing_standard_streams

    open_missing_standard_streams()
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
