"""Compares what the ranks of a process group have called, and puts it into words. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .records import Collective, GroupProgress

SAME_SIZE_EVERYWHERE = frozenset({"all_reduce", "allreduce", "broadcast", "reduce"})
"""Collectives whose tensors have the same size on all ranks; of others they may differ."""


def known_calls(one: GroupProgress) -> tuple[Collective, ...]:
    """The collectives that are known of a worker in a group, the newest last."""
    last = () if one.last is None else (one.last,)
    return (*(call for call in one.recent if one.last is None or call.serial != one.last.serial), *last)


def different(at: Mapping[int, Collective], *, all_sizes: bool = False) -> list[list[int]]:
    """The ranks by what they called, the most frequent first; of two as frequent ones, that of the lowest rank.

    Args:
        at: the call of each rank with the same sequence number.
        all_sizes: compare the sizes of every collective, also of those whose sizes may differ between ranks.
    """
    parts: dict[tuple[str, int | None], list[int]] = {}
    for rank in sorted(at):
        one = at[rank]
        size = one.size_bytes if all_sizes or one.name in SAME_SIZE_EVERYWHERE else None
        parts.setdefault((one.name, size), []).append(rank)
    return sorted(parts.values(), key=len, reverse=True)


def first_difference(
    calls: Mapping[int, Iterable[Collective]], *, all_sizes: bool = False
) -> tuple[int, dict[int, Collective], list[list[int]]] | None:
    """The lowest sequence number at which ranks called different collectives, their calls, and :func:`different`."""
    by_serial: dict[int, dict[int, Collective]] = {}
    for rank, known in calls.items():
        for call in known:
            by_serial.setdefault(call.serial, {})[rank] = call
    for serial in sorted(by_serial):
        parts = different(by_serial[serial], all_sizes=all_sizes)
        if len(parts) > 1:
            return serial, by_serial[serial], parts
    return None


def described(one: Collective) -> str:
    """Such as ``all_reduce of 25 MB``."""
    return one.name if not one.size_bytes else f"{one.name} of {size_words(one.size_bytes)}"


def size_words(size: int | None) -> str:
    """Such as ``25 MB``."""
    value = float(size or 0)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        value /= 1000
    raise AssertionError(size)


def rank_words(ranks: Iterable[int]) -> str:
    """Such as ``rank 3`` or ``ranks 0-2, 5``."""
    found = sorted(ranks)
    spans: list[list[int]] = []
    for rank in found:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' if len(found) > 1 else ''} {words}"
