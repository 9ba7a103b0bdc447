"""Whether this user's limits let an agent and its workers run at all, found out before anything is started."""

from __future__ import annotations

import os
import resource
import sys

from elastic_agent.config.errors import UsageError, quoted

AGENT_FILES, FILES_PER_WORKER = 80, 8
"""Descriptors that an agent opens at most, and more for each worker, in it or in its guard (measured)."""

AGENT_TASKS, TASKS_PER_WORKER = 15, 2
"""Processes and threads: the agent's, guard and spawner; a worker and the standby that is to replace it."""

TORCH_MB = 500
"""Address space that is too small for `import torch`: its CPU build takes 610 MB, 530 MB without numpy (measured)."""


def check_limits(slots: int, *, run_python: bool = True) -> None:
    """Check that an agent and so many workers have enough descriptors, processes and, if they run Python, memory.

    Below these numbers the agent would hang, or end with an error that does not name the cause.

    Raises:
        UsageError: they have not, or this Python cannot be started again.
    """
    _check_interpreter()
    check_open_files(slots)
    if run_python:
        _check_address_space()
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    wanted = AGENT_TASKS + TASKS_PER_WORKER * slots
    if os.geteuid() != 0 and limit != resource.RLIM_INFINITY and limit < wanted:  # root is exempt
        raise UsageError(
            f"this user can have only {limit} processes and threads",
            f"expected at least {wanted} for {_workers(slots)}: raise the limit (ulimit -u)",
        )


def check_open_files(slots: int) -> None:
    """Check that so many workers have enough descriptors (0: the store alone); raises ``UsageError``."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = AGENT_FILES + FILES_PER_WORKER * slots
    if limit != resource.RLIM_INFINITY and limit < wanted:
        needed_for = f" for {_workers(slots)}" if slots else ""
        raise UsageError(
            f"a process of this user can have only {limit} open files",
            f"expected at least {wanted}{needed_for}: raise the limit (ulimit -n; in a service LimitNOFILE)",
        )


def _workers(slots: int) -> str:
    return f"{slots} worker{'s' if slots > 1 else ''}"


def _check_interpreter() -> None:
    """Guard, spawner and cold workers are further processes of it."""
    if not sys.executable or not os.access(sys.executable, os.X_OK):
        raise UsageError(
            f"this user (id {os.geteuid()}) cannot execute the Python interpreter "
            f"{quoted(sys.executable)}, which the agent needs to start more processes",
            "expected an interpreter that this user can execute",
        )


def _check_address_space() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < TORCH_MB * 10**6:
        raise UsageError(
            f"a process of this user can have only {limit // 10**6} MB of address space",
            f"PyTorch alone needs more than {TORCH_MB} MB: ulimit -v unlimited; in a service LimitAS=infinity",
        )
