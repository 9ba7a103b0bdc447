"""The processes of a node by what they are, what they use of the processor and how much memory they hold."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from .scene import Scene

KINDS = {"elastic-spawner": "spawner", "elastic-standby": "standbys", "elastic-stores": "stores"}
"""Of our processes, by the name that the kernel shows; the others are the guard, the agent and the workers."""
MB = 1e6
CPUCLOCK_SCHED = 2


def by_kind(scene: Scene, node: str) -> dict[str, list[psutil.Process]]:
    """Agent, guard, spawner, stores, standbys and workers (under another launcher: agent, others and workers)."""
    workers = scene.worker_pids()
    other = "guard" if scene.launcher.keeps_journal else "others"
    kinds: dict[str, list[psutil.Process]] = {}
    for process in scene.processes(node):
        if process.pid == scene.agents[node].pid:
            kind = "agent"
        elif process.pid in workers:
            kind = "workers"
        else:
            kind = KINDS.get(_kernel_name(process), other)
        kinds.setdefault(kind, []).append(process)
    return kinds


def _kernel_name(process: psutil.Process) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/comm").read_text(errors="replace").strip()
    return ""


def pss_mb(processes: Iterable[psutil.Process]) -> float:
    """Proportional set size: what several processes share is divided among them, so sums count everything once."""
    return float(sum(one.memory_full_info().pss for one in processes)) / MB


def rss_mb(processes: Iterable[psutil.Process]) -> float:
    return float(sum(one.memory_info().rss for one in processes)) / MB


def processor_s(processes: Iterable[psutil.Process]) -> float:
    """What these processes have used, their ended threads included, in nanoseconds' resolution."""
    return sum(time.clock_gettime(_processor_clock(one.pid)) for one in processes if one.is_running())


def _processor_clock(pid: int) -> int:
    """The clock that clock_getcpuclockid(3) gives for another process."""
    return ~pid << 3 | CPUCLOCK_SCHED
