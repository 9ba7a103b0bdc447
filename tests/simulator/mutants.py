"""Deliberate bugs, to show that the checker can fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One deliberate bug."""

    name: str
    what: str
    quirks: tuple[str, ...] = ()


MUTANTS: dict[str, Mutant] = {}


@contextmanager
def applied(mutant: Mutant | None) -> Iterator[tuple[str, ...]]:
    """The real classes with this bug in them, for a while."""
    yield () if mutant is None else mutant.quirks
