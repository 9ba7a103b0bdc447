"""Whether workers can be started warm, and what their spawner has to be told."""

from __future__ import annotations

import os
import sys

from elastic_agent.config.settings import Settings
from elastic_agent.workers.guard_client import Guard

from .environment import libraries_environment

PATIENCE_SHARE = 1 / 3
"""Of the start time-out: how long a generation waits for a spawner that still imports, before it starts cold."""


def why_cold(settings: Settings) -> str | None:
    """Why workers are started cold although warm ones were asked for; None when they are not."""
    if settings.no_python and not settings.run_path:
        return "--no-python starts a program of its own"
    if settings.python_exec not in (None, sys.executable):
        return f"--python-exec names another Python than the agent's {sys.executable}"
    if settings.numa_binding is not None:
        return "--numa-binding starts each worker through numactl"
    if settings.script.endswith(".pyc"):
        return "the script is compiled already"
    return None


def is_warm(settings: Settings) -> bool:
    """Whether workers are to be forked from a spawner."""
    return settings.worker_start == "warm" and why_cold(settings) is None


def keep_warm(guard: Guard, settings: Settings, slots: int) -> None:
    """Have the guard keep a spawner for ``slots`` workers, if workers are to be warm."""
    if is_warm(settings):
        guard.keep_warm(
            settings.python_exec or sys.executable,
            _first_on_path(settings),
            settings.preload,
            libraries_environment(os.environ, slots),
            slots,
        )


def _first_on_path(settings: Settings) -> str:
    """What ``sys.path[0]`` is in the workers."""
    if settings.module and not settings.run_path:
        return os.getcwd()
    if os.path.isdir(settings.script):
        return os.path.abspath(settings.script)
    return os.path.dirname(os.path.realpath(settings.script))
