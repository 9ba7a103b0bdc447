"""What the integration does, in parts that can be disabled by name."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from elastic_agent.worker_variables import TRANSFORMERS_DISABLE


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


def enabled(environ: Mapping[str, str]) -> tuple[frozenset[Feature], str]:
    """The features that are not disabled, and a complaint about names that are not features, or ``""``."""
    text = environ.get(TRANSFORMERS_DISABLE, "")
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = {str(feature): feature for feature in Feature}
    unknown = [name for name in names if name not in known]
    complaint = (
        f"{TRANSFORMERS_DISABLE}={text!r}: no such feature: {', '.join(unknown)}; expected a comma-separated list of "
        f"{', '.join(known)}"
        if unknown
        else ""
    )
    return frozenset(Feature) - {known[name] for name in names if name in known}, complaint
