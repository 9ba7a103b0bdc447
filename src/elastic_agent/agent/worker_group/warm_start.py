"""Whether workers can be started warm, and the configuration of their spawner."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Mapping
from functools import cache

from elastic_agent.agent.devices import likely_slots
from elastic_agent.config.settings import Settings
from elastic_agent.workers.guard.client import Guard, SpawnerConfig

from .script_files import known_modules
from .script_scan import needs_own_python

PATIENCE_SHARE = 1 / 3
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


def start_guard(settings: Settings, *, owns_process: bool) -> Guard:
    """Start the guard, and with it the spawner, if workers are to be warm and their number is known.

    ``owns_process``: the caller handles ``WorkerBornError``, so the spawner may be a fork of this process.
    Then torch is imported here, before.

    Raises:
        OSError: no process can be created.
    """
    slots = likely_slots(settings.nproc_per_node)
    if not is_warm(settings) or slots is None:
        return Guard.start()
    config = spawner_config(settings, slots)
    if owns_process and _started_plainly():
        processors = os.sched_getaffinity(0)
        _import_torch(config.environment)
        if _forks_well():
            return Guard.start_with_spawner(config, processors)
    guard = Guard.start()
    guard.keep_warm(config)
    return guard


def spawner_config(settings: Settings, slots: int) -> SpawnerConfig:
    """The spawner for ``slots`` workers."""
    python = settings.python_exec or sys.executable
    environment = libraries_environment(os.environ, slots)
    folder = _first_on_path(settings)
    learn = known_modules(settings, folder)
    return SpawnerConfig(python, folder, settings.preload, environment, slots, learn)


def _started_plainly() -> bool:
    """Whether this interpreter has the flags that ``python SCRIPT`` would have."""
    return len(sys.orig_argv) > 1 and (sys.orig_argv[1] == "-m" or not sys.orig_argv[1].startswith("-"))


def _forks_well() -> bool:
    """Whether everything imported here survives a fork; otherwise a separate spawner finds out, and reports why."""
    from elastic_agent.workers.spawner.fork_safety import UnsafeError, check_fork_safety

    try:
        check_fork_safety()
    except UnsafeError:
        return False
    return True


def _import_torch(environment: dict[str, str]) -> None:
    """Import it as the workers would, without the collections that are a tenth of the time."""
    before = dict(os.environ)
    os.environ.update(environment)
    gc.disable()
    try:
        importlib.import_module("torch")
    finally:
        gc.freeze()  # or the first collection, soon after, would take a tenth of a second to look through it
        gc.enable()
        for name in environment:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


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
