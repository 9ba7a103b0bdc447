"""The variables that libraries read when they are loaded, which may be before the workers exist. Pure.

A module of its own: it is imported before the spawner is forked, and every warm worker has what was imported by then.
"""

from __future__ import annotations

from collections.abc import Mapping


def libraries_environment(inherited: Mapping[str, str], slots: int) -> dict[str, str]:
    """What libraries read when they are loaded; the same for every worker of a node with ``slots`` workers."""
    env = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": inherited.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")}
    if "OMP_NUM_THREADS" not in inherited and slots > 1:
        env["OMP_NUM_THREADS"] = "1"  # as torchrun: many workers on one machine, one pool each
    return env
