"""Finds the processes of workers that are kept while everything else of their generation is ended.

Whatever is not certainly theirs is ended with the rest.
"""

from __future__ import annotations

from elastic_agent import linux
from elastic_agent.worker_variables import SLOT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic_agent.linux import Process


def family(workers: Mapping[int, int], processes: Sequence[Process], guard_pid: int) -> set[int]:
    """Return which of the guard's descendants are kept workers, or theirs.

    Args:
        workers: The slots of the kept workers, by process.
        processes: All descendants of the guard.
        guard_pid: It is the parent of those whose own parent has ended.
    """
    ours = {*workers}
    groups = {process.group for process in processes if process.pid in workers}
    slots = {str(slot) for slot in workers.values()}
    orphans = [process for process in processes if process.parent == guard_pid]
    ours |= {orphan.pid for orphan in orphans if orphan.group in groups or _slot_of(orphan.pid) in slots}
    return ours | {process.pid for process in linux.below(ours, processes)}


def _slot_of(pid: int) -> str | None:
    """Return the slot whose worker started this program; None: not known."""
    try:
        return linux.environment(pid).get(SLOT)
    except OSError:  # it has ended, or is another user's
        return None
