"""What the integration does, in parts that can be disabled by name."""

from __future__ import annotations

from enum import StrEnum


class Feature(StrEnum):
    """A part of the integration; its value is the name in ``ELASTIC_AGENT_LIGHTNING_DISABLE``."""

    WORLD = "world"
    """Take the number of workers and nodes from the world, not from the script."""

    STEPS = "steps"
    """Report each training step to the agent."""

    NOTICES = "notices"
    """On a notice, save one checkpoint at a step that all ranks agree on, and leave."""

    RESUME = "resume"
    """Continue a training from its newest checkpoint, if it is certainly the same and the script names none."""

    SAMPLER = "sampler"
    """Continue an epoch with the samples that have not been used, also in a world of another size."""

    SIGNALS = "signals"
    """Install no signal handlers, broadcast no SIGTERM flag, and ignore Slurm: the agent does all of this."""
