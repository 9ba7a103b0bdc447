"""``elastic-agent serve [options]``: host the store on a machine that does not train."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from elastic_agent.cli.help import serve_page
from elastic_agent.config.directories import make_state_dir
from elastic_agent.config.errors import UsageError, quoted
from elastic_agent.config.load import Resolved, resolve
from elastic_agent.config.script import check_working_directory
from elastic_agent.config.settings import spec_by_name
from elastic_agent.config.sources import Layer
from elastic_agent.config.sources.command_line import CommandLine, parse_command_line
from elastic_agent.exit_codes import ExitCode

if TYPE_CHECKING:
    from elastic_agent.config.settings import Settings
    from elastic_agent.transport import Secret

OPTIONS = (
    "rdzv_endpoint",
    "state_dir",
    "log_format",
    "log_level",
    "secret_file",
    "config",
)
"""The settings that serve has."""


def serve(argv: Sequence[str]) -> int:
    """Read the settings, set up the log, and serve until a signal to stop.

    Raises:
        UsageError: the settings are wrong; nothing was started.
    """
    line = parse_command_line(argv, page=serve_page(OPTIONS))
    _check(line)
    check_working_directory()
    resolved = resolve(line, os.environ, script_needed=False, only=OPTIONS)
    _check_port(resolved)
    make_state_dir(resolved.settings.state_dir, os.environ)
    return _serve(resolved)


def _check(line: CommandLine) -> None:
    for name in line.given:
        if name not in OPTIONS:
            flags = ", ".join(spec_by_name()[option].flag for option in OPTIONS)
            raise UsageError(
                f"serve: {spec_by_name()[name].flag} is an option of elastic-agent run; serve accepts {flags}"
            )
    if line.script is not None:
        raise UsageError(f"serve: got {quoted(line.script)}; serve runs no script, expected only options")


def _check_port(resolved: Resolved) -> None:
    source = resolved.sources["rdzv_endpoint"]
    if resolved.settings.rdzv_endpoint is None and source.layer is not Layer.DEFAULT:
        raise UsageError(
            f"{source}: got port 0", "expected a fixed port, 1 to 65535, that the agents can connect to"
        )


def _serve(resolved: Resolved) -> int:
    # Imported late: a mistake must be answered before that.
    from elastic_agent.agent.devices import check_open_files
    from elastic_agent.config.secrets import run_secret, take_secret_variables
    from elastic_agent.logs import adopt_library_loggers, configure_logging, get_logger
    from elastic_agent.name_lookups import shorten_lookups
    from elastic_agent.rendezvous.backends.c10d import store_server
    from elastic_agent.transport import Secret, TransportError

    settings = resolved.settings
    check_open_files(slots=0)
    configure_logging(settings.log_format, settings.log_level, sys.stderr)
    log = get_logger()
    for note in resolved.notes:
        (log.warning if note.level == "warning" else log.info)(note.text)
    variables = take_secret_variables()
    secret = run_secret(settings.secret_file, os.environ, variables.secret)
    adopt_library_loggers()
    shorten_lookups()
    try:
        as_asked = _host(settings, Secret(secret) if secret else None)
    except ValueError as error:
        raise UsageError(f"serve: {error}") from None
    except (store_server.CannotServeError, TransportError) as error:
        log.error(str(error))
        return ExitCode.NO_STORE
    except Exception:
        log.exception("internal error of elastic-agent")
        return ExitCode.INTERNAL
    return ExitCode.FINISHED if as_asked else ExitCode.INTERNAL


def _host(settings: Settings, secret: Secret | None) -> bool:
    """Host the store, or this machine's member of it, until a signal; return whether it ended as asked."""
    from elastic_agent.rendezvous.backends.c10d import store_server
    from elastic_agent.transport.c10d import StoreServers

    endpoint = settings.rdzv_endpoint
    if endpoint is not None and endpoint.others:
        from elastic_agent.rendezvous.backends.members import hosting  # gRPC takes a quarter of a second

        return asyncio.run(hosting.serve(endpoint, settings.state_dir, secret))
    stores = StoreServers(None)
    with contextlib.closing(stores):
        stores.await_ready()
        return asyncio.run(store_server.serve(endpoint, settings.state_dir, stores.serve, secret))
