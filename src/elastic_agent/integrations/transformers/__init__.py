"""Runs unmodified scripts with the ``Trainer`` of transformers in elastic worlds.

Warm workers call :func:`install` when the script imports transformers. In a script that is started cold, or to be
independent of this, pass the callback: ``Trainer(..., callbacks=[ElasticCallback()])``. Outside of elastic-agent
neither changes anything. docs/transformers.md describes the features.
"""

from __future__ import annotations

import os

from elastic_agent.integrations.adapting import adapt
from elastic_agent.integrations.transformers.features import Feature
from elastic_agent.worker_variables import GENERATION, TRANSFORMERS_DISABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elastic_agent.integrations.transformers.callback import ElasticCallback

__all__ = ["ElasticCallback", "install"]


def install() -> None:
    """Adapt ``transformers.trainer.Trainer``; once, and only in a worker of elastic-agent."""
    if GENERATION not in os.environ:  # unlike the run id, it is never set by users
        return
    from elastic_agent.integrations.transformers import private_names

    adapt(TRANSFORMERS_DISABLE, Feature, private_names.apply)


def __getattr__(name: str) -> Any:
    # Imported when used, because it imports transformers.
    if name == "ElasticCallback":
        from elastic_agent.integrations.transformers.callback import ElasticCallback

        return ElasticCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
