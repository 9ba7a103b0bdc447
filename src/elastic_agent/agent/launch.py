"""From settings in force to an exit code: starts this node's agent and reports how it ended."""

from __future__ import annotations

import contextlib
import socket
import sys

from elastic_agent.agent.worker_group.interruptions import StopSignals
from elastic_agent.agent.worker_group.warm_start import is_warm, spawner_config, why_cold
from elastic_agent.config.errors import UsageError
from elastic_agent.config.load import Resolved
from elastic_agent.config.secrets import SecretVariables
from elastic_agent.config.settings import Settings
from elastic_agent.exit_codes import ExitCode
from elastic_agent.logs import adopt_library_loggers, get_logger
from elastic_agent.name_lookups import shorten_lookups
from elastic_agent.protocol import FailureKind, Outcome
from elastic_agent.sd_notify import SystemdNotifier
from elastic_agent.transport import StoreLostError
from elastic_agent.transport.c10d import StoreServers
from elastic_agent.workers.guard.client import Guard

from .agent import Agent, EndedAtOnceError
from .backend import configured_backend
from .devices import check_numa_binding, count_slots, crowding, likely_slots
from .identity import IdentityError
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
    settings = resolved.settings
    shorten_lookups()
    adopt_library_loggers()
    try:
        stores = StoreServers(stores_line)
    except StoreLostError as error:
        raise UsageError(str(error)) from None
    try:
        return _run(settings, guard, stores, manager, stop_signals, variables)
    finally:
        stores.close()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # it has no reader, or is closed
                stream.flush()


def _run(
    settings: Settings,
    guard: Guard,
    stores: StoreServers,
    manager: SystemdNotifier,
    stop_signals: StopSignals,
    variables: SecretVariables,
) -> int:
    log = get_logger()
    slots = count_slots(settings.nproc_per_node)
    check_numa_binding(settings.numa_binding)
    if (warning := crowding(slots)) is not None:
        log.warning(warning)
    if is_warm(settings) and likely_slots(settings.nproc_per_node) is None:
        guard.keep_warm(spawner_config(settings, slots))
    if settings.worker_start == "warm" and (reason := why_cold(settings)) is not None:
        log.info(f"workers start cold: {reason}")
    try:
        backend = configured_backend(settings, variables, stores.serve)
        agent = Agent(settings, slots, guard, stores, backend, manager, stop_signals)
        stores.await_ready()
    except (ValueError, OSError, StoreLostError) as error:
        # The log directory, the event journal, the entry point for logs; torch cannot be imported.
        raise UsageError(str(error)) from None
    try:
        ending = agent.run()
    except IdentityError as error:
        log.error(str(error))
        return ExitCode.REFUSED
    except EndedAtOnceError as error:
        return 128 + error.signum
    return _exit_code(ending)


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
