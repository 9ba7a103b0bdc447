"""What the integration does, in parts that can be disabled by name."""

from __future__ import annotations

from enum import StrEnum


class Feature(StrEnum):
    """A part of the integration; its value is the name in ``ELASTIC_AGENT_TRANSFORMERS_DISABLE``."""

    STEPS = "steps"
    """Report each training step to the agent."""

    NOTICES = "notices"
    """On a notice, save one checkpoint at a step that all ranks agree on, and leave."""

    RESUME = "resume"
    """Continue a training from its newest checkpoint, if it is certainly the same and the script names none."""

    SAMPLES = "samples"
    """Use each sample once per epoch, also when the number of workers changes."""
