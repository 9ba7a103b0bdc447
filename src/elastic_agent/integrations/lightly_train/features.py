"""What the integration does, in parts that can be disabled by name."""

from __future__ import annotations

from enum import StrEnum


class Feature(StrEnum):
    """A part of the integration; its value is the name in ``ELASTIC_AGENT_LIGHTLY_TRAIN_DISABLE``."""

    WORLD = "world"
    """Divide the batch by the number of workers in the world, not by that in the script's arguments."""

    RESUME = "resume"
    """After a restart, continue the training that this run has begun in the output folder."""
