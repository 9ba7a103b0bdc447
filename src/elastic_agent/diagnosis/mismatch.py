"""Finds the worker that called a different collective, in the errors of TORCH_DISTRIBUTED_DEBUG=DETAIL. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from .findings import Finding

_CALL = re.compile(
    r"Rank (?P<rank>\d+) is running collective: CollectiveFingerPrint\(SequenceNumber=(?P<number>\d+), "
    r"OpType=(?P<name>\w+)(?:, TensorShape=\[(?P<shape>[\d, ]*)\])?"
)


def different_collective(failures: Sequence[Finding]) -> Finding:
    """Of workers that failed because their collectives differ, the one whose call differs from most others.

    Args:
        failures: the first of them is such a worker.
    """
    first = failures[0]
    calls = {
        one.worker.rank: call
        for one in failures
        if one.standing is first.standing and (call := _call(one)) is not None
    }
    if first.worker.rank not in calls:
        return first
    counts = Counter(calls.values())
    usual, _ = counts.most_common(1)[0]
    odd = min(calls, key=lambda rank: (counts[calls[rank]], calls[rank] == usual, rank))
    found = next(one for one in failures if one.worker.rank == odd)
    other = next((call for call in calls.values() if call != calls[odd]), None)
    if other is None:
        return first
    return replace(found, what=f"called {_words(calls[odd])} while most others called {_words(other)}")


def _call(one: Finding) -> tuple[str, str] | None:
    """Name and shape of the collective that the worker called."""
    for found in _CALL.finditer(one.what):
        if int(found["rank"]) == one.worker.rank:
            return found["name"].lower(), found["shape"] or ""
    return None


def _words(call: tuple[str, str]) -> str:
    name, shape = call
    return f"{name} of shape [{shape}]" if shape else name
