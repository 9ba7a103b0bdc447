"""Finds the worker whose collective differs from those of the others, after an error that says they differ. Pure.

The last collectives of each worker tell, which it reported when an exception ended its script; of a worker that gloo
aborted they are not known. With TORCH_DISTRIBUTED_DEBUG=DETAIL, the errors tell.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .collective_calls import described, first_difference, known_calls, rank_words
from .findings import Finding
from .records import Collective

ERRORS = frozenset({"collective-mismatch", "collective-shapes"})
"""The names of the known errors that say so."""

_DETAIL = re.compile(
    r"Rank (?P<rank>\d+) is running collective: CollectiveFingerPrint\(SequenceNumber=(?P<number>\d+), "
    r"OpType=(?P<name>\w+)(?:, TensorShape=\[(?P<shape>[\d, ]*)\])?"
)


@dataclass(frozen=True)
class Mismatch:
    """Which worker's collective differs."""

    odd: Finding | None
    """None: it cannot be told which of them is wrong."""
    what: str
    """What it called, and the others."""
    is_certain: bool = True


def find_mismatch(first: Finding, findings: Sequence[Finding]) -> Mismatch | None:
    """Who called what; None if that is not known.

    Args:
        first: the worker with the error, the first of several.
        findings: all workers of the generation.
    """
    return _by_last_collectives(first, findings) or _by_errors(first, findings)


# -- by the last collectives --------------------------------------------------------------------------


def _by_last_collectives(first: Finding, findings: Sequence[Finding]) -> Mismatch | None:
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


# -- by the errors of TORCH_DISTRIBUTED_DEBUG=DETAIL ----------------------------------------------------


def _by_errors(first: Finding, findings: Sequence[Finding]) -> Mismatch | None:
    """The worker whose call differs from most others."""
    calls = {
        one.worker.rank: call
        for one in findings
        if one.standing is first.standing and (call := _called(one)) is not None
    }
    counts = Counter(calls.values())
    if first.worker.rank not in calls or len(counts) < 2:
        return None
    usual, most = counts.most_common(1)[0]
    odd = min((rank for rank in calls if calls[rank] != usual), key=lambda rank: (counts[calls[rank]], rank))
    if counts[calls[odd]] == most:
        words = (f"{rank_words(_with(calls, call))} called {_words(call)}" for call in list(counts)[:3])
        return Mismatch(None, "; ".join(words), is_certain=False)
    found = next(one for one in findings if one.worker.rank == odd)
    return Mismatch(found, f"called {_words(calls[odd])} while most others called {_words(usual)}")


def _with(calls: Mapping[int, tuple[str, str]], call: tuple[str, str]) -> list[int]:
    return [rank for rank, one in calls.items() if one == call]


def _called(one: Finding) -> tuple[str, str] | None:
    """Name and shape of the collective that the worker called."""
    for found in _DETAIL.finditer(one.what):
        if int(found["rank"]) == one.worker.rank:
            return found["name"].lower(), found["shape"] or ""
    return None


def _words(call: tuple[str, str]) -> str:
    name, shape = call
    return f"{name} of shape [{shape}]" if shape else name
