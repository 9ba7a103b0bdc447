"""Runs unmodified scripts with the ``Trainer`` of transformers in elastic worlds.

Workers call :func:`install` when the script imports transformers. Where they cannot (Python started with ``-I``, say),
pass the callback: ``Trainer(..., callbacks=[ElasticCallback()])``. Outside of elastic-agent neither changes anything.
docs/script.md describes the features.
"""

from __future__ import annotations

import os

from elastic_agent.worker_variables import GENERATION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elastic_agent.integrations.transformers.callback import ElasticCallback
    from elastic_agent.integrations.transformers.private_names import Feature

__all__ = ["ElasticCallback", "install"]


def install() -> frozenset[Feature]:
    """Adapt ``transformers.trainer.Trainer``, once, in a worker of elastic-agent only; return the features in force."""
    if GENERATION not in os.environ:  # unlike the run id, it is never set by users
        return frozenset()
    from elastic_agent.integrations.transformers import private_names

    return private_names.adapt()


def __getattr__(name: str) -> Any:
    # Imported when used, because it imports transformers.
    if name == "ElasticCallback":
        from elastic_agent.integrations.transformers.callback import ElasticCallback

        return ElasticCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
