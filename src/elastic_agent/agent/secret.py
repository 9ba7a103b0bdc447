"""The secret of the run that the settings name, as the transport takes it."""

from __future__ import annotations

from collections.abc import Mapping

from elastic_agent.config.run_secret import run_secret
from elastic_agent.config.settings import Settings
from elastic_agent.transport import Secret


def configured_secret(settings: Settings, environ: Mapping[str, str], variable: str | None) -> Secret | None:
    """Return the secret, None if there is none; ``variable`` and errors as for :func:`run_secret`."""
    found = run_secret(settings.secret_file, environ, variable)
    return Secret(found) if found else None
