"""Finds the worker whose collective differs from those of the others, after an error that says they differ. Pure.

The last collectives of each worker tell, which it reported when an exception ended its script; of a worker that gloo
aborted they are not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .collective_calls import described, first_difference, known_calls, rank_words
from .findings import Finding
from .records import Collective

MISMATCH = "collective-mismatch"
"""The name of the known error that PyTorch raises on all ranks, on those that are right too."""

ERRORS = frozenset({MISMATCH, "collective-shapes"})
"""The names of the known errors that say so."""


@dataclass(frozen=True)
class Mismatch:
    """Which worker's collective differs."""

    odd: Finding | None
    """None: it cannot be told which of them is wrong."""
    what: str
    """What it called, and the others."""
    is_certain: bool = True


def find_mismatch(first: Finding, findings: Sequence[Finding]) -> Mismatch | None:
    """Find who called what; None if that is not known.

    Args:
        first: the worker with the error, the first of several.
        findings: all workers of the generation.
    """
    by_rank = {one.worker.rank: one for one in findings}
    for name in sorted({group.group for one in findings for group in one.worker.progress}):
        calls = {
            rank: known_calls(group)
            for rank, one in by_rank.items()
            for group in one.worker.progress
            if group.group == name
        }
        found = first_difference(calls, all_sizes=True)
        if found is not None:
            return _judged(*found, by_rank)
        alike = _all_but_the_first(first, calls, len(findings))
        if alike is not None:
            return alike
    return None


def _judged(
    serial: int, at: Mapping[int, Collective], parts: list[list[int]], by_rank: Mapping[int, Finding]
) -> Mismatch:
    usual, odd = parts[0], [rank for part in parts[1:] for rank in part]
    number = f"both with sequence number {serial}"
    if len(usual) <= len(odd):
        words = "; ".join(f"{rank_words(part)} called {_call(at[part[0]])}" for part in parts[:3])
        return Mismatch(None, f"{words}, {number}", is_certain=False)
    words = f"called {_call(at[odd[0]])} where {rank_words(usual)} called {_call(at[usual[0]])}, {number}"
    unknown = len(by_rank) - len(at)
    return Mismatch(by_rank[odd[0]], words, is_certain=len(usual) > len(odd) + unknown)


def _all_but_the_first(
    first: Finding, calls: Mapping[int, Sequence[Collective]], world_size: int
) -> Mismatch | None:
    """If the others are known to have called the same, the worker that was aborted has called something else.

    Of some of the others nothing may be known, because they were stopped first; most of those that are known count.
    """
    ranks = sorted(calls)
    common = (
        set.intersection(*({call.serial for call in known} for known in calls.values())) if calls else set()
    )
    if first.worker.rank in calls or not common or (len(ranks) == 1 and world_size > 2):
        return None
    serial = max(common)
    other = f"another collective{f' at {first.worker.line}' if first.worker.line else ''}, or one of another size,"
    usual = f"called {_call(next(call for call in calls[ranks[0]] if call.serial == serial))}"
    if len(ranks) == 1:
        both = f"{rank_words(ranks)} {usual}, and rank {first.worker.rank} called {other}"
        return Mismatch(None, f"{both} with sequence number {serial}", is_certain=False)
    words = f"called {other} where {rank_words(ranks)} {usual}, both with sequence number {serial}"
    return Mismatch(first, words, is_certain=False)


def _call(one: Collective) -> str:
    return f"{described(one)}{f' at {one.line}' if one.line else ''}"
