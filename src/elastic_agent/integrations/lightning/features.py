"""What the integration does, in parts that can be disabled by name."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from elastic_agent.worker_variables import LIGHTNING_DISABLE


class Feature(StrEnum):
    """A part of the integration; its value is the name in ``ELASTIC_AGENT_LIGHTNING_DISABLE``."""

    WORLD = "world"
    """Take the number of workers and nodes from the world, not from the script."""

    HEARTBEATS = "heartbeats"
    """Report each training step to the agent."""

    NOTICES = "notices"
    """On a notice, save one checkpoint at a step that all ranks agree on, and leave."""

    RESUME = "resume"
    """Resume from the run's newest checkpoint if the script names none."""

    SAMPLER = "sampler"
    """Continue an epoch with the samples that have not been used, also in a world of another size."""

    SIGNALS = "signals"
    """Install no signal handlers, broadcast no SIGTERM flag, and ignore Slurm: the agent does all of this."""

    PROGRESS_BAR = "progress-bar"
    """Continue the progress bar at the step that was restored."""


def enabled(environ: Mapping[str, str]) -> tuple[frozenset[Feature], str]:
    """The features that are not disabled, and a complaint about names that are not features, or ``""``."""
    text = environ.get(LIGHTNING_DISABLE, "")
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = {str(feature): feature for feature in Feature}
    unknown = [name for name in names if name not in known]
    complaint = (
        f"{LIGHTNING_DISABLE}={text!r}: no such feature: {', '.join(unknown)}; expected a comma-separated list of "
        f"{', '.join(known)}"
        if unknown
        else ""
    )
    return frozenset(Feature) - {known[name] for name in names if name in known}, complaint
