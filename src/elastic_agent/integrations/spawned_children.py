"""Installs integrations in the processes that a worker starts with `multiprocessing`, which begin as new interpreters.

Forked children have inherited them.
"""

from __future__ import annotations

from multiprocessing import spawn
from typing import Any

__all__ = ["install"]

_BEGIN = """
try:
    from elastic_agent.integrations import post_import
except ImportError:  # another interpreter, see multiprocessing.set_executable
    pass
else:
    post_import.watch(post_import.IN_CHILDREN)
"""


class _Begin:
    """Runs when a child unpickles what its parent tells it first."""

    def __reduce__(self) -> tuple[Any, tuple[str, dict[str, Any]]]:
        return exec, (_BEGIN, {})


def install() -> None:
    """Begin once ``multiprocessing.spawn`` has been imported."""
    original = spawn.get_preparation_data

    def with_integrations(name: str) -> dict[str, Any]:
        return {**original(name), "elastic_agent": _Begin()}

    spawn.get_preparation_data = with_integrations
