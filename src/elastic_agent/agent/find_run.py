"""Finds the run at the endpoint, and claims it among the agents that share the state directory.

At a start without a run id it tells which run of the same command was stopped on this machine, and how to resume it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from functools import partial

from elastic_agent.agent.events import RunAgreed
from elastic_agent.agent.worker_group.command import command_on_this_machine, job_fingerprint
from elastic_agent.config.errors import UsageError
from elastic_agent.logs import bind_context, get_logger
from elastic_agent.protocol import FINISHED_BEFORE, Outcome, Plan
from elastic_agent.rendezvous.backends.c10d.backend import DIAL_TIMEOUT_S
from elastic_agent.rendezvous.events import Disconnected
from elastic_agent.rendezvous.run_history import JobFiles
from elastic_agent.rendezvous.waits import in_time
from elastic_agent.transport import (
    DiskThread,
    NotAStoreError,
    StoreLostError,
    UnreachableError,
    run_abandonable,
)

from .identity import using_state_dir
from .local_node import LocalNode
from .run_claim import CLAIM_FILE, Claim, OtherCommandError, OtherRunError
from .supervisor import Ending

REDIAL_S = 0.5
FIRST_DIAL_S = DIAL_TIMEOUT_S + 1.0
"""The time after which it is known why the first attempt to reach the store failed."""

PATIENCE_S = 10.0
"""The time to wait for agents of another endpoint, which may just be ending (a requeued job)."""

DISK_S = 1.0
"""The time that the disk may take to tell of a stopped run, or to take note of one; else that is left out."""

PAUSE_S, LONG_PAUSE_S = 0.1, 1.0
"""Between the attempts, and those of a longer wait: each is some calls to a file server."""


async def find_run(node: LocalNode, waits: Callable[[], None]) -> int | Ending:
    """Find the run, whose name the backend has then, and become one of its agents.

    Args:
        node: this node.
        waits: called when an earlier life of the job is waited for.

    Returns:
        The descriptor that holds the run's lock; or why this node takes no part.

    Raises:
        UsageError: the state directory cannot be used, or the run is another one than this agent was started for.
    """
    while True:
        if (unreachable := await _agree_on_run(node)) is not None:
            return unreachable
        bind_context(run=node.run_id)
        node.event_log.bind(run=node.run_id)
        if node.settings.rdzv_id is None and node.scheduled is None:
            await _tell_of_stopped_run(node)
        if await _has_finished_before(node):
            get_logger().info(f"the run finished: {FINISHED_BEFORE}")
            return Ending(Outcome.FINISHED, FINISHED_BEFORE)
        claim, has_waited = await _claim_run(node, waits)
        if node.settings.rdzv_id is not None or not has_waited:
            return claim
        os.close(claim)  # the run that was in the way has ended, and its generated id with it


async def _agree_on_run(node: LocalNode) -> Ending | None:
    """Have the backend know the run's id: given, or agreed with the other agents; return why that is not possible."""
    settings, backend = node.settings, node.backend
    if settings.rdzv_id is not None:
        backend.run_id = settings.rdzv_id
        return None
    limit_s = max(settings.join_timeout, FIRST_DIAL_S)
    with using_state_dir(settings.state_dir):
        try:
            await asyncio.wait_for(_agree(node), limit_s)
        except TimeoutError:
            reason = (
                f"no store answered at {backend.shown} within {limit_s:g} s: "
                f"{node.console.last_problem or 'connecting did not complete'}"
            )
            return Ending(Outcome.UNREACHABLE, reason).with_remedy(node.console.remedy)
        except NotAStoreError as error:
            return Ending(Outcome.UNREACHABLE, str(error))
    return None


async def _agree(node: LocalNode) -> None:
    """Agree on the id of this job's run at the endpoint; dial until the store answers.

    Raises:
        NotAStoreError: something else answers there.
    """
    fingerprint = job_fingerprint(node.settings)
    while True:
        try:
            await in_time(node.backend.agree(fingerprint), 6 * DIAL_TIMEOUT_S)
        except (UnreachableError, StoreLostError) as error:
            node.publish(Disconnected.by(error))
            await asyncio.sleep(REDIAL_S)
        else:
            node.publish(RunAgreed(node.run_id))
            return


async def recall(node: LocalNode) -> Plan | None:
    """Return the history of the run on this machine's disk."""
    with using_state_dir(node.settings.state_dir):
        return await node.backend.history_store.load(node.run_id)


async def _has_finished_before(node: LocalNode) -> bool:
    """Return whether the run has finished and is not run again, by the local run history, without a store.

    The agent that would host the store reads the same history, and may have ended before this one dials.
    """
    history = await recall(node)
    return history is not None and history.settled and node.policy.skips(history)


async def _claim_run(node: LocalNode, waits: Callable[[], None]) -> tuple[int, bool]:
    """Return the descriptor of the claim, and whether agents of another run had to end before."""
    settings, job, asked_s = node.settings, node.job, time.monotonic()
    command = command_on_this_machine(settings)
    disk = DiskThread("claim")  # not asyncio.to_thread, whose thread would stay

    def claimed() -> Claim:
        return Claim.of(settings.rdzv_endpoint, settings.rdzv_backend, command, job)

    claim, has_waited, is_told = await asyncio.wrap_future(disk.submit("endpoint", claimed)), False, False
    while True:
        try:
            take = partial(claim.take, node.folder)
            with using_state_dir(settings.state_dir):
                return await asyncio.wrap_future(disk.submit("claim", take)), has_waited
        except OtherRunError as refusal:
            waited_s = time.monotonic() - asked_s
            patience_s = settings.join_timeout if refusal.is_earlier_life else PATIENCE_S
            if waited_s >= patience_s:
                raise _refused(node, refusal, command) from None
            if refusal.is_earlier_life and not is_told:
                waits()  # it is known why the run does not start
                get_logger().info(
                    f"an earlier start of job {job.scheduled} still runs at {refusal}; waiting up to "
                    f"{patience_s:g} s for its end; if it does not end, end its agents (elastic-agent stop there)"
                )
                is_told = True
            has_waited = True
        await asyncio.sleep(PAUSE_S if waited_s < PATIENCE_S else LONG_PAUSE_S)


def _refused(node: LocalNode, refusal: OtherRunError, command: str) -> UsageError:
    settings = node.settings
    if_dead = f"if that machine is dead, remove {node.folder / CLAIM_FILE}"
    if refusal.is_earlier_life:
        return UsageError(
            f"an earlier start of job {node.job.scheduled} still runs at {refusal} after {settings.join_timeout:g} s "
            f"(--join-timeout); end its agents, then requeue the job; {if_dead}"
        )
    if isinstance(refusal, OtherCommandError):
        return UsageError(
            f"this agent was given `{command}`, but run {node.run_id} at {settings.rdzv_endpoint} runs `{refusal}` on "
            "this machine; give this one another --rdzv-id, or wait until that run has ended"
        )
    return UsageError(
        f"run {node.run_id} is already running at {refusal}, and its agents use the same state directory, "
        f"{settings.state_dir}; give this run another --rdzv-id, or its agents another --state-dir; {if_dead}"
    )


# -- runs that were stopped ----------------------------------------------------------------------


async def note_end(node: LocalNode, outcome: Outcome) -> None:
    """Note a run that was stopped, or forget the one before, as the command has finished since."""
    files, command = _job_files(node)
    with contextlib.suppress(OSError, StoreLostError):
        if outcome is Outcome.STOPPED:
            await run_abandonable(lambda: files.write(command, node.run_id), DISK_S)
        elif outcome is Outcome.FINISHED:
            await run_abandonable(lambda: files.remove(command), DISK_S)


async def _tell_of_stopped_run(node: LocalNode) -> None:
    """Log how to resume the run of this command that was stopped last, unless the command has finished since."""
    files, command = _job_files(node)
    with contextlib.suppress(OSError, StoreLostError):
        stopped = await run_abandonable(lambda: files.run_of(command), DISK_S)
        if stopped not in (None, node.run_id):
            get_logger().info(
                f"run {stopped} of the same command was stopped before, and this is another run; to resume that one, "
                f"pass --rdzv-id {stopped}"
            )


def _job_files(node: LocalNode) -> tuple[JobFiles, str]:
    return JobFiles(node.settings.state_dir), f"stopped {command_on_this_machine(node.settings)}"
