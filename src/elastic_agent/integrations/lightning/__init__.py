"""Runs unmodified Lightning and Fabric scripts in elastic worlds.

Lightning calls the two functions here through its entry points whenever a ``Trainer`` or ``Fabric`` is created.
Outside of elastic-agent they return no callbacks and change nothing. docs/script.md describes the features.
"""

from __future__ import annotations

import os

from elastic_agent.worker_variables import GENERATION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elastic_agent.integrations.lightning.private_names import Feature

__all__ = ["fabric_callbacks", "trainer_callbacks"]


def trainer_callbacks() -> list[Any]:
    """Return the callbacks to add to a ``Trainer``."""
    features = _adapt()
    if not features:
        return []
    from elastic_agent.integrations.lightning.callback import make_callback

    return [make_callback(features)]


def fabric_callbacks() -> list[Any]:
    """Return no callbacks to add to a ``Fabric``: the methods that are adapted do what can be done for it."""
    _adapt()
    return []


def _adapt() -> frozenset[Feature]:
    """Adapt what is loaded of Lightning; return the features in force, none outside of elastic-agent."""
    if GENERATION not in os.environ:  # unlike the run id, it is never set by users
        return frozenset()
    from elastic_agent.integrations.lightning import private_names

    return private_names.adapt()
