"""Lines of the integration in the output of a worker."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """One line on stderr, beside Lightning's own."""
    print(f"elastic_agent: {line}", file=sys.stderr, flush=True)
