"""The workers that run on this machine, found by what their agents put into their environment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "ELASTIC_AGENT_"


@dataclass(frozen=True)
class LivingWorker:
    """A process that some agent of this machine started as a worker."""

    pid: int
    run_id: str
    worker_id: str
    stacks_signal: int
    """On which it writes its stacks, if it has a handler for it."""

    @property
    def output(self) -> str:
        """Where its standard error goes, as far as a person can open that."""
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/{self.pid}/fd/2")
        return ""


def living_workers(run_id: str | None = None) -> list[LivingWorker]:
    """Those whose environment this user may read; of one run if it is named. Their own children are left out."""
    found = {one.pid: one for one in _marked() if run_id in (None, one.run_id)}
    own = [one for one in found.values() if not _is_child_of(one, found)]
    return sorted(own, key=lambda one: (one.run_id, one.worker_id))


def _is_child_of(worker: LivingWorker, others: dict[int, LivingWorker]) -> bool:
    parent = others.get(_parent(worker.pid))
    return parent is not None and parent.worker_id == worker.worker_id


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _marked() -> Iterator[LivingWorker]:
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            data = Path(f"/proc/{entry}/environ").read_bytes()
        except OSError:  # another user's, or gone
            continue
        if f"{_PREFIX}WORKER_ID=".encode() in data:
            variables = dict(
                one.split("=", 1) for one in data.decode(errors="replace").split("\0") if "=" in one
            )
            with contextlib.suppress(KeyError, ValueError):
                yield LivingWorker(
                    int(entry),
                    variables[f"{_PREFIX}RUN_ID"],
                    variables[f"{_PREFIX}WORKER_ID"],
                    int(variables[f"{_PREFIX}STACKS_SIGNAL"]),
                )


def catches(pid: int, signum: int) -> bool:
    """Whether the process has a handler for this signal (one without would die of it)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    masks = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(masks) and bool(int(masks[0], 16) >> (signum - 1) & 1)
