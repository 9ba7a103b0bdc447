"""Starts the guard, and with it the spawner of warm workers, if workers can be started warm."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Collection, Mapping
from functools import cache

from elastic_agent.agent.devices import likely_slots
from elastic_agent.config.settings import Settings
from elastic_agent.linux import start_ticks
from elastic_agent.logs import get_logger
from elastic_agent.workers.guard.client import Guard, SpawnerConfig, kill_orphans

from .script_scan import curated_imports, imports, needs_own_python

PATIENCE_SHARE = 2 / 3
"""Of the start time-out: how long a generation waits for a spawner that still imports, before it starts cold."""

ORPHANS_S = 2.0
"""The time in which processes are to end whose guard has died."""


def libraries_environment(inherited: Mapping[str, str], slots: int) -> dict[str, str]:
    """Return what libraries read when they are loaded; the same for every worker of a node with ``slots`` workers.

    Here, not with the rest of a worker's environment: warm workers have imported torch before they get that.
    """
    env = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": inherited.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")}
    if "OMP_NUM_THREADS" not in inherited and slots > 1:
        env["OMP_NUM_THREADS"] = "1"  # as torchrun: many workers on one machine, one pool each
    return env


def why_cold(settings: Settings) -> str | None:
    """Return why workers are started cold although warm ones are configured; None when they are not."""
    if settings.runs_program:
        return "--no-python runs a program other than Python"
    if settings.python_exec not in (None, sys.executable):
        return f"--python-exec is not the agent's Python, {sys.executable}"
    if settings.numa_binding is not None:
        return "--numa-binding starts each worker through numactl"
    if settings.script.endswith(".pyc"):
        return "the script is compiled bytecode"
    is_module = settings.runs_module
    return _script_needs_own_python(
        settings.script, is_module, _first_on_path(settings), settings.nproc_per_node
    )


@cache
def _script_needs_own_python(script: str, is_module: bool, folder: str, nproc_per_node: str) -> str | None:
    """Read the script, once per agent, as its spawner is made once: a script that changes is not read again."""
    environ = {**os.environ, **libraries_environment(os.environ, likely_slots(nproc_per_node) or 1)}
    return needs_own_python(script, is_module=is_module, folder=folder, environ=environ)


def keeps_workers(settings: Settings) -> bool:
    """Return whether workers keep their processes when the world changes: asked for, and the script may be made for it.

    Another script would do all of its work apart from any world.
    """
    if settings.survive != "keep":
        return False
    folder, module = _first_on_path(settings), "elastic_agent.survive"
    may_be = not settings.runs_program and imports(settings.script, settings.runs_module, folder, module)
    if not may_be:
        why = f"{settings.script} does not import {module}, outside of functions, nor does a file beside it"
        get_logger().warning(f"--survive keep: workers are started again: {why}")
    return may_be


def is_warm(settings: Settings) -> bool:
    """Return whether workers are to be forked from a spawner."""
    return settings.worker_start == "warm" and why_cold(settings) is None


def start_guard(settings: Settings) -> tuple[Guard, socket.socket | None]:
    """Start the guard, and with it the spawner, if workers are to be warm and their number is known.

    Returns:
        The guard, and the line to the process in which the spawner has stores served; None: there will be no spawner.

    Raises:
        OSError: no process can be created.
    """
    if not is_warm(settings):
        return Guard.start(), None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    guard = Guard.start(stores=theirs)
    slots = likely_slots(settings.nproc_per_node)
    if slots is not None:
        guard.keep_warm(spawner_config(settings, slots))
    return guard, ours


def start_next_guard(settings: Settings, slots: int, spared: Collection[int | None]) -> Guard:
    """Start a guard after one that has died; kill what that has left, but for the processes ``spared``."""
    # The loop, and so the lease, waits for it.
    kill_orphans(min(ORPHANS_S, settings.lease_ttl / 4), spared)
    guard = Guard.start()
    if is_warm(settings):
        guard.keep_warm(spawner_config(settings, slots))
    return guard


class Guards:
    """The guard process of this node, and the one after it if it dies."""

    def __init__(self, first: Guard, start_next: Callable[[], Guard]) -> None:
        """Begin with a guard that runs; ``start_next`` starts one after it has died."""
        self.present = first
        self._start_next = start_next

    def replace(self) -> None:
        """Start the next guard."""
        self.present.close()
        self.present = self._start_next()

    @property
    def processes(self) -> list[tuple[int, int]]:
        """The process to be gone before a successor of this agent starts workers: the guard, whose end kills all."""
        ticks = start_ticks(self.present.pid)
        return [(self.present.pid, ticks)] if ticks is not None else []

    def close(self) -> None:
        """End the present guard, and with it all workers."""
        with contextlib.suppress(OSError, ValueError):
            self.present.close()


def spawner_config(settings: Settings, slots: int) -> SpawnerConfig:
    """Return the spawner for ``slots`` workers."""
    python = settings.python_exec or sys.executable
    environment = libraries_environment(os.environ, slots)
    folder = _first_on_path(settings)
    imports = curated_imports(settings.script, settings.runs_module, folder)
    return SpawnerConfig(python, folder, settings.preload, environment, slots, imports)


def _first_on_path(settings: Settings) -> str:
    """Return what ``sys.path[0]`` is in the workers."""
    try:
        if settings.runs_module:
            return os.getcwd()
        if os.path.isdir(settings.script):
            return os.path.abspath(settings.script)
        return os.path.dirname(os.path.realpath(settings.script))
    except OSError:  # the working directory was removed
        return os.sep
