"""The secret of the run that the settings name, as the transport takes it."""

from __future__ import annotations

from collections.abc import Mapping

from elastic_agent.config.errors import UsageError
from elastic_agent.config.secret_source import SecretSource
from elastic_agent.config.settings import Settings
from elastic_agent.logs import get_logger
from elastic_agent.transport import Munge, MungeError, Secret


def configured_secret(
    settings: Settings, environ: Mapping[str, str], variable: str | None
) -> Secret | Munge | None:
    """The secret, or what the host of the store tells it with; None: there is none, and no source was named.

    Blocks while another agent creates the secret; ``variable`` and errors as for :meth:`SecretSource.find`, and
    ``UsageError`` if MUNGE does not work on this machine.
    """
    source = SecretSource(
        settings.secret_source, settings.secret_file, settings.state_dir, settings.join_timeout
    )
    found = source.find(environ, variable, get_logger().info)
    if not source.is_told:
        return Secret(found) if found else None
    try:
        return Munge.of_this_user()
    except MungeError as error:
        raise UsageError(f"--secret-source munge: {error}") from None
