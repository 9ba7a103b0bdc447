"""From settings in force to an exit code: starts this node's agent and reports how it ended."""

from __future__ import annotations

import contextlib
import socket
import sys

from elastic_agent.agent.worker_group.interruptions import StopSignals
from elastic_agent.config.errors import UsageError
from elastic_agent.config.load import Resolved
from elastic_agent.config.secrets import SecretVariables
from elastic_agent.exit_codes import ExitCode
from elastic_agent.logs import adopt_library_loggers, get_logger
from elastic_agent.name_lookups import shorten_lookups
from elastic_agent.protocol import FailureKind, Outcome
from elastic_agent.sd_notify import SystemdNotifier
from elastic_agent.transport import StoreLostError
from elastic_agent.transport.c10d import StoreServers
from elastic_agent.workers.guard.client import Guard

from .identity import IdentityError
from .run_node import run_node
from .signals import EndedAtOnceError
from .supervisor import Ending


def launch(
    resolved: Resolved,
    guard: Guard,
    stores_line: socket.socket | None,
    manager: SystemdNotifier,
    stop_signals: StopSignals,
    variables: SecretVariables,
) -> int:
    """Run this node's agent until its part is over.

    Args:
        resolved: the settings in force.
        guard: was started for it.
        stores_line: leads to the process that serves its stores, which the guard's spawner forks; None: none does.
        manager: systemd, if that has started this process.
        stop_signals: which came since this process began.
        variables: taken out of the environment before the guard was started.

    Returns:
        The exit code.

    Raises:
        UsageError: the settings are wrong for this machine.
    """
    shorten_lookups()
    adopt_library_loggers()
    try:
        stores = StoreServers(stores_line)
    except StoreLostError as error:
        raise UsageError(str(error)) from None
    try:
        return _exit_code(run_node(resolved.settings, guard, stores, manager, stop_signals, variables))
    except IdentityError as error:
        get_logger().error(str(error))
        return ExitCode.REFUSED
    except EndedAtOnceError as error:
        return 128 + error.signum
    finally:
        stores.close()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # it has no reader, or is closed
                stream.flush()


def _exit_code(ending: Ending) -> int:
    log = get_logger()
    match ending.outcome:
        case Outcome.FINISHED:
            return ExitCode.FINISHED
        case Outcome.FAILED:
            too_few = ending.failure is not None and ending.failure.kind is FailureKind.TOO_FEW
            return ExitCode.TOO_FEW_NODES if too_few else ExitCode.FAILED
        case Outcome.DRAINED:
            return ExitCode.DRAINED
        case Outcome.STOPPED:
            return ExitCode.STOPPED
        case Outcome.REFUSED | Outcome.NODE_ID_HELD:
            is_held = ending.outcome is Outcome.NODE_ID_HELD
            hint = "; give each agent another --node-id, or none" if is_held else ""
            log.error(f"the run refused this node: {ending.reason}{hint}")
            return ExitCode.REFUSED
        case Outcome.UNREACHABLE:
            log.error(ending.reason)
            return ExitCode.NO_STORE
        case Outcome.STUCK:
            log.error(ending.reason)
            return ExitCode.NOT_STOPPED
