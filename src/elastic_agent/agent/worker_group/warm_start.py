"""Whether workers can be started warm, and the configuration of their spawner."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from functools import cache

from elastic_agent.agent.devices import likely_slots
from elastic_agent.config.settings import Settings
from elastic_agent.workers.guard.client import Guard, SpawnerConfig

from .script_scan import curated_imports, needs_own_python

PATIENCE_SHARE = 2 / 3
"""Of the start time-out: how long a generation waits for a spawner that still imports, before it starts cold."""


def libraries_environment(inherited: Mapping[str, str], slots: int) -> dict[str, str]:
    """What libraries read when they are loaded; the same for every worker of a node with ``slots`` workers.

    Here, not with the rest of a worker's environment: warm workers have imported torch before they get that.
    """
    env = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": inherited.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")}
    if "OMP_NUM_THREADS" not in inherited and slots > 1:
        env["OMP_NUM_THREADS"] = "1"  # as torchrun: many workers on one machine, one pool each
    return env


def why_cold(settings: Settings) -> str | None:
    """Why workers are started cold although warm ones are configured; None when they are not."""
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
    """Evaluated once per agent, as its spawner is made once: a script that changes is not read again."""
    environ = {**os.environ, **libraries_environment(os.environ, likely_slots(nproc_per_node) or 1)}
    return needs_own_python(script, is_module=is_module, folder=folder, environ=environ)


def is_warm(settings: Settings) -> bool:
    """Whether workers are to be forked from a spawner."""
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


def spawner_config(settings: Settings, slots: int) -> SpawnerConfig:
    """The spawner for ``slots`` workers."""
    python = settings.python_exec or sys.executable
    environment = libraries_environment(os.environ, slots)
    folder = _first_on_path(settings)
    imports = curated_imports(settings.script, settings.runs_module, folder)
    return SpawnerConfig(python, folder, settings.preload, environment, slots, imports)


def _first_on_path(settings: Settings) -> str:
    """What ``sys.path[0]`` is in the workers."""
    try:
        if settings.runs_module:
            return os.getcwd()
        if os.path.isdir(settings.script):
            return os.path.abspath(settings.script)
        return os.path.dirname(os.path.realpath(settings.script))
    except OSError:  # the working directory was removed
        return os.sep
