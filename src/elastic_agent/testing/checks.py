"""Checks of what users care about."""

from __future__ import annotations

import os
from dataclasses import dataclass

from elastic_agent.testing.cluster import LocalCluster
from elastic_agent.testing.mistakes import Evidence, after_notice


@dataclass(frozen=True)
class Check:
    """One check, and what was found."""

    passed: bool
    text: str

    def __str__(self) -> str:
        return f"{'ok' if self.passed else 'FAILED'}: {self.text}"


def check_notices(seen: Evidence) -> Check:
    """Whether steps were lost after notices."""
    later = after_notice(seen.journal, seen.course)
    lost = {earlier: one.lost for earlier, one in later.items() if one.lost}
    words = ", ".join(f"{steps} after generation {earlier}" for earlier, steps in lost.items())
    return Check(not lost, f"steps lost after {len(later)} notices: {words or 'none'}")


def check_leftovers(cluster: LocalCluster) -> Check:
    """Whether processes, heartbeat files or shared memory of workers were left behind."""
    left = [f"process {pid}" for pid in cluster.wait_gone(cluster.marked_processes())]
    born = cluster.records("born")
    beats = {str(one["heartbeat_file"]) for one in born if one["heartbeat_file"]}
    left += [path for path in sorted(beats) if os.path.exists(path)]
    prefixes = tuple(f"torch_{one['pid']}_" for one in born)
    left += [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name.startswith(prefixes)]
    return Check(not left, f"left behind: {', '.join(left) or 'nothing'}")
