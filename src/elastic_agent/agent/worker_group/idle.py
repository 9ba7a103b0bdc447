"""Measures for how long workers and their descendants have done nothing: no processor time, no input or output."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from elastic_agent import linux

IDLE_AFTER_S = 60.0

_SHARE = 0.01
"""Of a processor: threads that poll, and processes that log measurements, use less."""
_SLACK_S = 0.05
_BYTES_PER_S = 1024
_SLACK_BYTES = 64 * 1024

_Used = dict[int, tuple[float, int]]
"""Processor time and bytes read and written, by process."""


class IdleMeter:
    """Watches the workers of one generation. To be asked every few seconds."""

    def __init__(self, now_s: float) -> None:
        """Begin; ``now_s``: by a clock that never goes back."""
        self._since_s = now_s
        """When one of the processes was last seen to do something, or when this meter was made."""
        self._before: _Used = {}
        """What they had used when they were asked before."""

    def idle_s(self, workers: Collection[int], now_s: float) -> float:
        """Return for how long these processes and their descendants have done nothing."""
        own = _used(workers)
        # Descendants are looked for, which takes longer, only if the workers themselves do nothing.
        if self._is_active(own, now_s) or self._is_active(family := _used(_with_descendants(workers)), now_s):
            self._since_s, self._before = now_s, own
        else:
            self._before = family | {pid: used for pid, used in self._before.items() if pid in family}
        return now_s - self._since_s

    @property
    def processes(self) -> tuple[int, ...]:
        """The workers and their descendants."""
        return tuple(sorted(self._before))

    def _is_active(self, used: _Used, now_s: float) -> bool:
        known = [(used[pid], before) for pid, before in self._before.items() if pid in used]
        cpu_s = sum(now[0] - before[0] for now, before in known)
        moved = sum(now[1] - before[1] for now, before in known)
        length_s = now_s - self._since_s
        return cpu_s > _SHARE * length_s + _SLACK_S or moved > _BYTES_PER_S * length_s + _SLACK_BYTES


def _with_descendants(pids: Iterable[int]) -> set[int]:
    return {one for pid in pids for one in (pid, *linux.family(pid))}


def _used(pids: Iterable[int]) -> _Used:
    found: _Used = {}
    for pid in pids:
        try:
            found[pid] = linux.cpu_time_s(pid), linux.transferred_bytes(pid)
        except OSError:  # it is gone
            continue
    return found
