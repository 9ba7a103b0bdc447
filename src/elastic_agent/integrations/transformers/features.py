"""What the integration does, in parts that can be disabled by name."""

from __future__ import annotations

from enum import StrEnum


class Feature(StrEnum):
    """A part of the integration; its value is the name in ``ELASTIC_AGENT_TRANSFORMERS_DISABLE``."""

    HEARTBEATS = "heartbeats"
    """Report each training step to the agent."""

    NOTICES = "notices"
    """On a notice, save one checkpoint at a step that all ranks agree on, and leave."""

    RESUME = "resume"
    """Resume from the run's newest checkpoint if the script passes no ``resume_from_checkpoint``."""

    SAMPLES = "samples"
    """Use each sample once per epoch, also when the number of workers changes."""
