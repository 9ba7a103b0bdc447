"""Site defaults: settings from the machine's manager (Slurm, systemd), used where the user set none.

A site source is a function from the environment to the settings it knows. A new manager is one more function
in ``SITE_DEFAULTS``; the first one that gives a setting wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elastic_agent.config.sources.base import Given, Layer, Source
from elastic_agent.config.sources.slurm import slurm

SiteDefaults = Callable[[Mapping[str, str]], Mapping[str, Given]]


def systemd(environ: Mapping[str, str]) -> dict[str, Given]:
    """The directories systemd makes for a service with ``StateDirectory=`` and ``LogsDirectory=``."""
    given = {}
    for name, variable in (("state_dir", "STATE_DIRECTORY"), ("log_dir", "LOGS_DIRECTORY")):
        first = environ.get(variable, "").split(":")[0]
        if first:
            given[name] = Given(first, Source(Layer.SITE, f"systemd's {variable}"))
    return given


SITE_DEFAULTS: tuple[SiteDefaults, ...] = (slurm, systemd)
