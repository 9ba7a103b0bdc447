"""From settings in force to an exit code: starts this node's agent and reports how it ended."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from elastic_agent.agent.worker_group.interruptions import StopSignals
from elastic_agent.agent.worker_group.warm_start import is_warm, spawner_config, why_cold
from elastic_agent.config.errors import UsageError
from elastic_agent.config.load import Resolved
from elastic_agent.config.secret_variables import SecretVariables
from elastic_agent.config.settings import Settings
from elastic_agent.exit_codes import ExitCode
from elastic_agent.logs import adopt_library_loggers, get_logger
from elastic_agent.protocol import FailureKind, Outcome
from elastic_agent.sd_notify import SystemdNotifier
from elastic_agent.workers.guard.client import Guard

from .identity import IdentityError

if TYPE_CHECKING:  # torch is imported quietly, and late
    from .supervisor import Ending


def launch(
    resolved: Resolved,
    guard: Guard,
    manager: SystemdNotifier,
    stop_signals: StopSignals,
    variables: SecretVariables,
) -> int:
    """Run this node's agent, with the guard that was started for it, until its part is over. Returns the exit code.

    ``variables``: taken out of the environment before the guard was started.

    Raises:
        UsageError: the settings are wrong for this machine.
    """
    settings = resolved.settings
    try:
        return _run(settings, guard, manager, stop_signals, variables)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # it has no reader, or is closed
                stream.flush()


def import_torch_quietly() -> None:
    """Import torch (a second) so that its store client does not warn of every wait that ends by its time-out.

    The variable is read once, at import, and is gone before any worker could inherit it.
    """
    name = "TORCH_CPP_LOG_LEVEL"
    if name in os.environ:
        import torch

        return
    os.environ[name] = "ERROR"
    try:
        import torch  # noqa: F401
    finally:
        del os.environ[name]


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """What torch brings along stays: looking through it for garbage, again and again, is a tenth of its import."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _run(
    settings: Settings,
    guard: Guard,
    manager: SystemdNotifier,
    stop_signals: StopSignals,
    variables: SecretVariables,
) -> int:
    with _without_collections():
        import_torch_quietly()
        from elastic_agent.transport import shorten_lookups

        from .agent import Agent, EndedAtOnceError
        from .backend import configured_backend
        from .devices import check_numa_binding, count_slots, crowding, likely_slots

    shorten_lookups()
    adopt_library_loggers()
    log = get_logger()
    slots = count_slots(settings.nproc_per_node)
    check_numa_binding(settings.numa_binding)
    if (warning := crowding(slots)) is not None:
        log.warning(warning)
    if is_warm(settings) and slots != likely_slots(settings.nproc_per_node):
        guard.keep_warm(spawner_config(settings, slots))
    if settings.worker_start == "warm" and (reason := why_cold(settings)) is not None:
        log.info(f"workers start cold: {reason}")
    try:
        backend = configured_backend(settings, variables)
        agent = Agent(settings, slots, guard, backend, manager, stop_signals)
    except (ValueError, OSError) as error:  # the log directory, the event journal, the entry point for logs
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
            log.info(f"this node has left the run: {ending.reason}")
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
