"""What every benchmark can be told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """``runs``: how often each thing is measured; ``quick``: most things once, and only what takes seconds."""

    runs: int = 5
    quick: bool = False
    isolated: bool = False
    """In a network namespace of our own, where every look-up of a name fails at once."""
    seed: int = 1
    """Of the first run of a benchmark that draws what happens; each further run has the next one."""

    @property
    def times(self) -> int:
        return 1 if self.quick else self.runs


def progress(text: str) -> None:
    """A line while it goes on; the tables come at the end."""
    print(f"  … {text}", flush=True)
