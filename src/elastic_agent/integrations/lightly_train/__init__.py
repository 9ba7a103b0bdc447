"""Runs unmodified LightlyTrain scripts in elastic worlds, on top of the integration for Lightning.

Workers call :func:`install` when the script imports ``lightly_train``. Outside of elastic-agent it changes nothing.
docs/frameworks.md describes the features.
"""

from __future__ import annotations

import os

from elastic_agent.worker_variables import GENERATION

__all__ = ["install"]


def install() -> None:
    """Adapt ``lightly_train``; once, and only in a worker of elastic-agent."""
    if GENERATION not in os.environ:  # unlike the run id, it is never set by users
        return
    from elastic_agent.integrations.lightly_train import private_names

    private_names.adapt()
