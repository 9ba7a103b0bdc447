"""The life of one node's agent, from its settings to the end of its part in the run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from contextlib import AsyncExitStack, ExitStack

from elastic_agent.agent import events
from elastic_agent.agent.reporting.event_command import EventCommand
from elastic_agent.agent.reporting.event_log import EventLog
from elastic_agent.agent.reporting.start_check import DOCTORS_PROBE, StartCheck
from elastic_agent.agent.reporting.systemd import SystemdReporter
from elastic_agent.agent.slurm.job import reachable_endpoint
from elastic_agent.agent.slurm.requeue import decide, how_to_join_again, how_to_resume, requeue
from elastic_agent.agent.worker_group.factory import WorkerFactory
from elastic_agent.agent.worker_group.heartbeat_files import sweep_heartbeat_files
from elastic_agent.agent.worker_group.interruptions import StopSignals
from elastic_agent.agent.worker_group.warm_start import (
    ORPHANS_S,
    Guards,
    is_warm,
    spawner_config,
    start_next_guard,
    why_cold,
)
from elastic_agent.config.errors import UsageError
from elastic_agent.config.secrets import SecretVariables, etcd_access, run_secret
from elastic_agent.config.settings import Settings
from elastic_agent.config.value_types import ETCD
from elastic_agent.exit_codes import ExitCode
from elastic_agent.logs import adopt_library_loggers, get_logger
from elastic_agent.name_lookups import shorten_lookups
from elastic_agent.protocol import FailureKind, Outcome
from elastic_agent.rendezvous.backends import BackendOptions, RendezvousBackend, open_backend
from elastic_agent.rendezvous.waits import in_time
from elastic_agent.sd_notify import SystemdNotifier
from elastic_agent.transport import Secret, StoreLostError, TransportError
from elastic_agent.transport.c10d import ServeStore, StoreServers
from elastic_agent.values import Endpoint
from elastic_agent.workers.guard.client import Guard, kill_orphans

from .devices import check_numa_binding, count_slots, likely_slots, telling_of_import
from .find_run import find_run, note_end
from .identity import IdentityError
from .local_node import LocalNode
from .signals import EndedAtOnceError
from .supervisor import Ending
from .take_part import take_part

RELEASE_S = 5.0
"""The time for removing a finished run's name from the store, if it was agreed for the job."""

OUTPUT_PATIENCE_S = 5.0
"""The time for writing the last lines of workers' output at the end."""


def launch(
    settings: Settings,
    guard: Guard,
    stores_line: socket.socket | None,
    manager: SystemdNotifier,
    stop_signals: StopSignals,
    variables: SecretVariables,
) -> int:
    """Run this node until its part in the run is over; then nothing of its agent is left.

    Args:
        settings: in force.
        guard: was started already, so that it is up by the time the world is agreed.
        stores_line: leads to the process that serves its stores, which the guard's spawner forks; None: none does.
        manager: systemd, if that has started this process.
        stop_signals: which came since this process began.
        variables: taken out of the environment before the guard was started.

    Returns:
        The exit code.

    Raises:
        UsageError: the settings are wrong for this machine, or torch cannot be imported.
    """
    shorten_lookups()
    adopt_library_loggers()
    try:
        with contextlib.closing(StoreServers(stores_line)) as stores:
            return _exit_code(settings, _run_node(settings, guard, stores, manager, stop_signals, variables))
    except StoreLostError as error:
        raise UsageError(str(error)) from None
    except IdentityError as error:
        get_logger().error(str(error))
        return ExitCode.REFUSED
    except EndedAtOnceError as error:
        return 128 + error.signum
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # it has no reader, or is closed
                stream.flush()


def _exit_code(settings: Settings, ending: Ending) -> int:
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
            if settings.script != DOCTORS_PROBE:  # it is in the report of the doctor
                log.error(ending.reason)
            return ExitCode.NO_STORE
        case Outcome.STUCK:
            log.error(ending.reason)
            return ExitCode.NOT_STOPPED


def _run_node(
    settings: Settings,
    guard: Guard,
    stores: StoreServers,
    manager: SystemdNotifier,
    stop_signals: StopSignals,
    variables: SecretVariables,
) -> Ending:
    slots = _count_workers(settings, guard)
    guards = Guards(guard, lambda: start_next_guard(settings, slots, [stores.pid, *backend.processes]))
    with ExitStack() as closing:  # in reverse order, when the loop has ended
        try:
            backend = _backend(settings, variables, stores.serve)
            event_log = EventLog(settings.event_journal)
            workers = WorkerFactory(settings, slots)
            stores.await_ready(telling_of_import())
        except (ValueError, OSError) as error:
            raise UsageError(str(error)) from None
        closing.callback(event_log.close)
        held = closing.enter_context(ExitStack())
        closing.callback(sweep_heartbeat_files)
        closing.callback(workers.close, OUTPUT_PATIENCE_S)
        closing.callback(kill_orphans, ORPHANS_S)
        closing.callback(guards.close)
        node = LocalNode(settings, slots, backend, guards, workers, event_log, stop_signals)
        systemd = SystemdReporter(manager, node.console.headline)
        node.publish.subscribe(systemd.on_event)
        ending = asyncio.run(_live(node, systemd, held))
        in_order = ending.outcome in (Outcome.FINISHED, Outcome.DRAINED, Outcome.STOPPED)
        systemd.ended(f"{ending.outcome.value}: {ending.reason}", in_order=in_order)
        return ending


def _backend(settings: Settings, variables: SecretVariables, serve: ServeStore) -> RendezvousBackend:
    """Return the rendezvous backend that the settings name, with the secret of the run.

    Raises:
        UsageError: the password for etcd or the run's secret cannot be read.
        ValueError: this machine is to host a member of etcd, which is not installed.
    """
    is_etcd = settings.rdzv_backend == ETCD
    secret = run_secret(settings.secret_file, os.environ, variables.secret)
    options = BackendOptions(
        reachable_endpoint(settings.rdzv_endpoint or Endpoint("127.0.0.1", 0), os.environ),
        settings.state_dir,
        settings.lease_ttl,
        settings.fence_margin,
        settings.local_addr,
        settings.port_range,
        Secret(secret) if secret else None,
        serve,
    )
    return open_backend(options, etcd_access(settings, variables.etcd_password) if is_etcd else None)


def _count_workers(settings: Settings, guard: Guard) -> int:
    """Return how many workers this node runs, and start their spawner if only now that number is known."""
    log = get_logger()
    slots = count_slots(settings.nproc_per_node)
    check_numa_binding(settings.numa_binding)
    if is_warm(settings) and likely_slots(settings.nproc_per_node) is None:
        guard.keep_warm(spawner_config(settings, slots))
    if settings.worker_start == "warm" and (reason := why_cold(settings)) is not None:
        log.info(f"workers start cold: {reason}")
    return slots


async def _live(node: LocalNode, systemd: SystemdReporter, held: ExitStack) -> Ending:
    try:
        async with AsyncExitStack() as closing:
            node.signals.open()
            closing.callback(node.signals.close)
            closing.push_async_callback(node.backend.leave)
            node.publish.subscribe(node.console.on_event)
            closing.callback(node.console.close)
            start_check = StartCheck(node.settings, lambda: node.console.last_problem)
            node.publish.subscribe(start_check.on_event)
            closing.callback(start_check.close)
            systemd.start()
            claim = await find_run(node, start_check.close)
            if isinstance(claim, Ending):
                node.publish(events.NotStarted(claim.reason))
                return claim
            held.callback(os.close, claim)
            command = EventCommand(node.settings.on_event, node.run_id, lambda: node.node_id)
            node.publish.subscribe(command.on_event)
            ending = (await take_part(node, held)).with_remedy(node.console.remedy)
            await _end(node, ending)
            await command.close()  # not before a job is requeued, for which there may be little time
            return ending
    except IdentityError as error:
        node.publish(events.NotStarted(str(error)))
        raise
    except asyncio.CancelledError:
        if node.signals.leave_signals:
            raise EndedAtOnceError(node.signals.leave_signals[-1]) from None
        raise


# -- the end of its part -------------------------------------------------------------------------


async def _end(node: LocalNode, ending: Ending) -> None:
    """Serve the store to others as long as they need it, and requeue the job."""
    node.workers.forget_states()
    if ending.outcome in (Outcome.FINISHED, Outcome.FAILED, Outcome.STOPPED):
        with contextlib.suppress(TransportError):  # the store is gone, and the agreement with it
            await in_time(node.backend.release(), RELEASE_S)
    if ending.outcome is Outcome.DRAINED:
        follows = how_to_join_again(ending.plan, node.scheduled, "here")
        get_logger().info(f"this node has left the run: {ending.reason}{follows}")
    await _host_on(node)
    node.backend.run_ended()
    await _requeue(node, ending)


async def _host_on(node: LocalNode) -> None:
    """Keep serving the store, if this node hosts it, until no run needs it any more."""
    node.signals.hosting_on = True
    while True:
        runs, nodes = _dependents(node), node.depending()
        node.publish(events.Hosting(runs, tuple(nodes)))
        if not runs:
            return
        await node.backend.changed()


def _dependents(node: LocalNode) -> tuple[str, ...]:
    """Return the runs for which to stay; the doctor's member of etcd goes when it is done, as it came."""
    settings, runs = node.settings, node.backend.busy_with
    is_guest = settings.script == DOCTORS_PROBE and settings.rdzv_endpoint and settings.rdzv_endpoint.others
    return tuple(run for run in runs if run == node.run_id or not is_guest)


async def _requeue(node: LocalNode, ending: Ending) -> None:
    """Requeue the job, if it is to be requeued and this agent is the one to do it; else say how to resume the run."""
    plan = ending.plan if ending.outcome is Outcome.STOPPED else None
    reason = plan.notice.cause.value if plan is not None and plan.notice is not None else ""
    decision = decide(node.settings, node.scheduled, reason, is_chosen=ending.is_requeuer)
    if decision.why:
        get_logger().info(decision.why)
    if decision.act:
        node.publish(await requeue(node.settings, node.scheduled))
    if ending.outcome is Outcome.FINISHED:
        await note_end(node, ending.outcome)
    if plan is None or (plan.world is None and plan.generation < 2):
        return
    if not decision.requeued:
        await note_end(node, ending.outcome)
        how = how_to_resume(node.settings, node.run_id, node.scheduled)
        get_logger().info(f"{how}: it goes on from the last checkpoint that the script has written")
