"""Whether this user's limits let an agent and its workers run at all, found out before anything is started."""

from __future__ import annotations

import os
import resource
import sys
import threading

from elastic_agent.config.errors import UsageError, quoted

AGENT_FILES, FILES_PER_WORKER = 80, 8
"""Descriptors that an agent opens at most, and more for each worker, in it or in its guard (measured)."""

AGENT_TASKS, TASKS_PER_WORKER = 15, 2
"""Processes and threads: the agent's, guard and spawner; a worker and the standby that is to replace it."""

MOST_TASKS_TRIED = 64
"""Limits that allow so many are not meant to stop anything that is started on purpose."""


def check_limits(slots: int) -> None:
    """An agent and so many workers have descriptors and processes enough.

    Below these numbers the agent would hang, or end with an error that does not name the cause.

    Raises:
        UsageError: they have not, or this Python cannot be started again.
    """
    _check_interpreter()
    check_open_files(slots)
    wanted = min(AGENT_TASKS + TASKS_PER_WORKER * slots, MOST_TASKS_TRIED)
    started = _threads_that_start(wanted)
    if started < wanted:
        raise UsageError(
            f"this user can start only {started} more processes and threads; expected at least {wanted} "
            f"for {_workers(slots)}: raise the limit (ulimit -u; in a container or service pids.max, "
            "TasksMax)"
        )


def check_open_files(slots: int) -> None:
    """So many workers have descriptors enough (0: the store alone); raises ``UsageError``."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = AGENT_FILES + FILES_PER_WORKER * slots
    if limit != resource.RLIM_INFINITY and limit < wanted:
        needed_for = f" for {_workers(slots)}" if slots else ""
        raise UsageError(
            f"a process of this user can have only {limit} open files; expected at least {wanted}{needed_for}: "
            "raise the limit (ulimit -n; in a service LimitNOFILE)"
        )


def _workers(slots: int) -> str:
    return f"{slots} worker{'s' if slots > 1 else ''}"


def _check_interpreter() -> None:
    """Guard, spawner and cold workers are further processes of it."""
    if not sys.executable or not os.access(sys.executable, os.X_OK):
        raise UsageError(
            f"this user (id {os.geteuid()}) cannot execute the Python interpreter "
            f"{quoted(sys.executable)}, which the agent needs to start more processes; expected an "
            "interpreter that this user can execute"
        )


def _threads_that_start(wanted: int) -> int:
    """How many threads can be there at once, up to ``wanted``. They count as processes do."""
    done = threading.Event()
    threads: list[threading.Thread] = []
    try:
        for _ in range(wanted):
            thread = threading.Thread(target=done.wait, name="limits", daemon=True)
            thread.start()
            threads.append(thread)
    except RuntimeError:  # can't start new thread
        pass
    finally:
        done.set()
        for thread in threads:
            thread.join()
    return len(threads)
