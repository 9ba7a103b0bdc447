"""Elastic launcher for PyTorch: one agent per machine, the same command everywhere.

Importing this package loads nothing heavy. Training scripts use :mod:`elastic_agent.client`; programs and notebooks
that start workers use :func:`launch`.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elastic_agent.launcher import launch as launch

__version__ = "0.1.0"


def __getattr__(name: str) -> "Any":
    """``launch``, when it is used: workers and the guard import this package too."""
    if name == "launch":
        from elastic_agent.launcher import launch

        return launch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
