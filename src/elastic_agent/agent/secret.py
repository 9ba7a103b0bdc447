"""The secret of the run that the settings name, as the transport takes it."""

from __future__ import annotations

from collections.abc import Mapping

from elastic_agent.config.errors import UsageError
from elastic_agent.config.run_secret import check_only_munge, run_secret
from elastic_agent.config.settings import Settings
from elastic_agent.transport import Munge, MungeError, Secret


def configured_secret(
    settings: Settings, environ: Mapping[str, str], variable: str | None
) -> Secret | Munge | None:
    """Return the secret, or what the host of the store tells it with; None: there is none, and no source was named.

    ``variable`` and errors as for :func:`run_secret`, and ``UsageError`` if MUNGE does not work on this machine, or
    another secret is given as well.
    """
    if settings.secret_source == "munge":
        check_only_munge(settings.secret_file, environ, variable)
        try:
            return Munge.of_this_user()
        except MungeError as error:
            raise UsageError(f"--secret-source munge: {error}") from None
    found = run_secret(settings.secret_file, environ, variable)
    return Secret(found) if found else None
