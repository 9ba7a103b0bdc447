"""Compares what the ranks of a process group have called, and finds the worker whose call differs. Pure.

The last collectives of each worker tell, which it reported when an exception ended its script; of a worker that gloo
aborted they are not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic_agent.printable import size_text

from .records import Collective, GroupProgress
from .verdicts import Verdict

MISMATCH = "collective-mismatch"
"""The name of the known error that PyTorch raises on all ranks, on those that are right too."""

ERRORS = frozenset({MISMATCH, "collective-shapes"})
"""The names of the known errors that say that the collectives of the ranks differ."""

SAME_SIZE_EVERYWHERE = frozenset({"all_reduce", "allreduce", "broadcast", "reduce"})
"""Collectives whose tensors have the same size on all ranks; of others they may differ."""


def known_calls(progress: GroupProgress) -> tuple[Collective, ...]:
    """Return the collectives that are known of a worker in a group, the newest last."""
    if progress.last is None:
        return progress.recent
    return (*(call for call in progress.recent if call.serial != progress.last.serial), progress.last)


def _by_call(at: Mapping[int, Collective], *, all_sizes: bool) -> list[list[int]]:
    """Group ranks by what they called, the most frequent call first; of equally frequent ones, that of the lowest rank.

    Args:
        at: the call of each rank with the same sequence number.
        all_sizes: compare the sizes of every collective, also of those whose sizes may differ between ranks.
    """
    parts: dict[tuple[str, int | None], list[int]] = {}
    for rank in sorted(at):
        call = at[rank]
        size = call.size_bytes if all_sizes or call.name in SAME_SIZE_EVERYWHERE else None
        parts.setdefault((call.name, size), []).append(rank)
    return sorted(parts.values(), key=len, reverse=True)


def first_difference(
    calls: Mapping[int, Iterable[Collective]], *, all_sizes: bool = False
) -> tuple[int, dict[int, Collective], list[list[int]]] | None:
    """Find the first sequence number at which ranks called different collectives, the calls, and the ranks by call."""
    by_serial: dict[int, dict[int, Collective]] = {}
    for rank, known in calls.items():
        for call in known:
            by_serial.setdefault(call.serial, {})[rank] = call
    for serial in sorted(by_serial):
        parts = _by_call(by_serial[serial], all_sizes=all_sizes)
        if len(parts) > 1:
            return serial, by_serial[serial], parts
    return None


def described(call: Collective) -> str:
    """Return such as ``all_reduce of 25 MB``."""
    return call.name if not call.size_bytes else f"{call.name} of {size_text(call.size_bytes)}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return such as ``rank 3`` or ``ranks 0-2, 5``."""
    found = sorted(ranks)
    spans: list[list[int]] = []
    for rank in found:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' if len(found) > 1 else ''} {shown}"


@dataclass(frozen=True)
class Mismatch:
    """The worker whose collective differs."""

    unlike: Verdict | None
    """None: it cannot be told which of them is wrong."""
    what: str
    """Names its call, and that of the others."""
    is_certain: bool = True


def find_mismatch(first: Verdict, verdicts: Sequence[Verdict]) -> Mismatch | None:
    """Find who called what; None if that is not known.

    Args:
        first: the worker with the error, the first of several.
        verdicts: all workers of the generation.
    """
    by_rank = {verdict.worker.rank: verdict for verdict in verdicts}
    for name in sorted({group.group for verdict in verdicts for group in verdict.worker.progress}):
        calls = {
            rank: known_calls(group)
            for rank, verdict in by_rank.items()
            for group in verdict.worker.progress
            if group.group == name
        }
        found = first_difference(calls, all_sizes=True)
        if found is not None:
            return _judged(*found, by_rank)
        alike = _all_but_the_first(first, calls, len(verdicts))
        if alike is not None:
            return alike
    return None


def _judged(
    serial: int, at: Mapping[int, Collective], parts: list[list[int]], by_rank: Mapping[int, Verdict]
) -> Mismatch:
    usual, unlike = parts[0], [rank for part in parts[1:] for rank in part]
    number = f"both with sequence number {serial}"
    if len(usual) <= len(unlike):
        calls = "; ".join(f"{ranks_text(part)} called {_call(at[part[0]])}" for part in parts[:3])
        return Mismatch(None, f"{calls}, {number}", is_certain=False)
    what = f"called {_call(at[unlike[0]])} where {ranks_text(usual)} called {_call(at[usual[0]])}, {number}"
    unknown = len(by_rank) - len(at)
    return Mismatch(by_rank[unlike[0]], what, is_certain=len(usual) > len(unlike) + unknown)


def _all_but_the_first(
    first: Verdict, calls: Mapping[int, Sequence[Collective]], world_size: int
) -> Mismatch | None:
    """Name the worker that was aborted, of which no call is known, if the others are known to have called the same.

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
        both = f"{ranks_text(ranks)} {usual}, and rank {first.worker.rank} called {other}"
        return Mismatch(None, f"{both} with sequence number {serial}", is_certain=False)
    what = f"called {other} where {ranks_text(ranks)} {usual}, both with sequence number {serial}"
    return Mismatch(first, what, is_certain=False)


def _call(call: Collective) -> str:
    return f"{described(call)}{f' at {call.line}' if call.line else ''}"
