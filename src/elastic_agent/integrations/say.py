"""Lines of the integrations in the output of a worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable


def say(line: str) -> None:
    """One line on stderr, beside those of the framework."""
    print(f"elastic_agent: {line}", file=sys.stderr, flush=True)


def say_once(lines: Iterable[str]) -> None:
    """Lines that all workers have alike: on rank 0 only."""
    if os.environ.get("RANK") == "0":
        for line in lines:
            say(line)
