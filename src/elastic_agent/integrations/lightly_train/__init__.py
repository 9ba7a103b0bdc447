"""Runs unmodified LightlyTrain scripts in elastic worlds, on top of the integration for Lightning.

Workers call :func:`install` when the script imports ``lightly_train``. Outside of elastic-agent it changes nothing.
docs/transformers.md describes the features.
"""

from __future__ import annotations

import os

from elastic_agent.integrations.adapting import adapt
from elastic_agent.integrations.lightly_train.features import Feature
from elastic_agent.worker_variables import GENERATION, LIGHTLY_TRAIN_DISABLE

__all__ = ["install"]


def install() -> None:
    """Adapt ``lightly_train``; once, and only in a worker of elastic-agent."""
    if GENERATION not in os.environ:  # unlike the run id, it is never set by users
        return
    from elastic_agent.integrations.lightly_train import private_names

    adapt(LIGHTLY_TRAIN_DISABLE, Feature, private_names.apply)
