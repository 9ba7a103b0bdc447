"""Checks of what users care about."""

from __future__ import annotations

import os
from dataclasses import dataclass

from elastic_agent.testing.cluster import LocalCluster
from elastic_agent.testing.mistakes import Evidence, steps_lost_after_notices

_HEED_NOTICES = (
    "check for notices after each step (client.Agreement().notice()), then save and call client.leave(); see "
    "docs/script.md, Notices"
)


@dataclass(frozen=True)
class Check:
    """One check, and what was found."""

    passed: bool
    text: str

    def __str__(self) -> str:
        return f"{'ok' if self.passed else 'FAILED'}: {self.text}"


def check_notices(seen: Evidence, *, is_explained: bool) -> Check:
    """Whether steps were lost after notices; ``is_explained``: a mistake of the script was named that may be why."""
    after = steps_lost_after_notices(seen)
    lost = [f"{steps} after generation {generation}" for generation, steps in after.items() if steps]
    text = f"steps lost after {len(after)} notices: {', '.join(lost) or 'none'}"
    return Check(not lost, f"{text}; {_HEED_NOTICES}" if lost and not is_explained else text)


def check_leftovers(cluster: LocalCluster) -> Check:
    """Whether processes, heartbeat files or shared memory of workers were left behind."""
    left = [f"process {pid}" for pid in cluster.wait_gone(cluster.marked_processes())]
    born = cluster.records("born")
    beats = {str(line["heartbeat_file"]) for line in born if line["heartbeat_file"]}
    left += [path for path in sorted(beats) if os.path.exists(path)]
    prefixes = tuple(f"torch_{line['pid']}_" for line in born)
    left += [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name.startswith(prefixes)]
    return Check(not left, f"left behind: {', '.join(left) or 'nothing'}")
