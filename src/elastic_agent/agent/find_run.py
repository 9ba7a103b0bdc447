"""Finds the run at the endpoint, and claims it among the agents that share the state directory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from elastic_agent.agent.events import RunAgreed
from elastic_agent.agent.worker_group.command import command_on_this_machine, job_fingerprint
from elastic_agent.config.errors import UsageError
from elastic_agent.logs import get_logger
from elastic_agent.protocol import FINISHED_BEFORE, Outcome, Plan
from elastic_agent.rendezvous.backends.c10d.backend import DIAL_TIMEOUT_S
from elastic_agent.rendezvous.events import Disconnected
from elastic_agent.rendezvous.waits import in_time
from elastic_agent.transport import NotAStoreError, StoreLostError, UnreachableError

from .local_node import LocalNode
from .run_claim import ClaimedEndpoint, OtherCommandError, RunClaim, RunElsewhereError
from .state_dir import using_state_dir
from .supervisor import Ending

REDIAL_S = 0.5


@dataclass(frozen=True)
class FoundRun:
    """The run that this node takes part in."""

    id: str
    claim: RunClaim


async def find_run(node: LocalNode, waits: Callable[[], None]) -> FoundRun | Ending:
    """Find the run, and become one of its agents; return why this node takes no part if it does not.

    ``waits`` is called when an earlier life of the job is waited for.

    Raises:
        UsageError: the state directory cannot be used, or the run is another one than this agent was started for.
    """
    while True:
        run_id = await _agree_on_run(node)
        if isinstance(run_id, Ending):
            return run_id
        node.takes_part_in(run_id)
        if await _has_finished_before(node, run_id):
            get_logger().info(f"the run finished: {FINISHED_BEFORE}")
            return Ending(Outcome.FINISHED, FINISHED_BEFORE)
        claim = await _claim_run(node, run_id, waits)
        if node.settings.rdzv_id is not None or not claim.has_waited:
            return FoundRun(run_id, claim)
        claim.release()  # the run that was in the way has ended, and its generated id with it


async def _agree_on_run(node: LocalNode) -> str | Ending:
    """Return the run's id: given, or agreed with the other agents at the endpoint."""
    settings, backend = node.settings, node.backend
    if settings.rdzv_id is not None:
        backend.run_id = settings.rdzv_id
        return settings.rdzv_id
    agreeing = _agree(node)
    with using_state_dir(settings.state_dir):
        try:
            return await asyncio.wait_for(agreeing, settings.join_timeout)
        except TimeoutError:
            reason = (
                f"no store answered at {backend.shown} within {settings.join_timeout:g} s: "
                f"{node.console.last_problem or 'connecting did not complete'}"
            )
            return Ending(Outcome.UNREACHABLE, reason).with_remedy(node.console.remedy)
        except NotAStoreError as error:
            return Ending(Outcome.UNREACHABLE, str(error))


async def _agree(node: LocalNode) -> str:
    """Return the id of this job's run at the endpoint; dial until the store answers.

    Raises:
        NotAStoreError: something else answers there.
    """
    fingerprint = job_fingerprint(node.settings)
    while True:
        try:
            run_id = await in_time(node.backend.agree(fingerprint), 6 * DIAL_TIMEOUT_S)
        except (UnreachableError, StoreLostError) as error:
            node.publish(Disconnected.by(error))
            await asyncio.sleep(REDIAL_S)
        else:
            node.publish(RunAgreed(run_id))
            return run_id


async def recall(node: LocalNode, run_id: str) -> Plan | None:
    """Return the history of the run on this machine's disk."""
    with using_state_dir(node.settings.state_dir):
        return await node.backend.history_store.load(run_id)


async def _has_finished_before(node: LocalNode, run_id: str) -> bool:
    """Return whether the run has finished and is not run again, by the local run history, without a store.

    The agent that would host the store reads the same history, and may have ended before this one dials.
    """
    history = await recall(node, run_id)
    return history is not None and history.settled and node.policy.skips(history)


async def _claim_run(node: LocalNode, run_id: str, waits: Callable[[], None]) -> RunClaim:
    settings, scheduled = node.settings, node.job.scheduled
    command = command_on_this_machine(settings)

    def tell(refusal: RunElsewhereError) -> None:
        waits()  # it is known why the run does not start
        get_logger().info(
            f"an earlier start of job {scheduled} still runs at {refusal}; it was asked to save and stop; waiting up "
            f"to {settings.join_timeout:g} s for its end"
        )

    def claimed() -> ClaimedEndpoint:
        return ClaimedEndpoint.of(settings.rdzv_endpoint, settings.rdzv_backend, command, node.job)

    try:
        with using_state_dir(settings.state_dir):
            return await RunClaim.await_turn(node.folder(run_id), claimed, settings.join_timeout, tell)
    except OtherCommandError as error:
        raise UsageError(
            f"this agent was given `{command}`, but run {run_id} at {settings.rdzv_endpoint} runs `{error}` on "
            "this machine; give this one another --rdzv-id, or wait until that run has ended"
        ) from None
    except RunElsewhereError as error:
        if error.is_earlier_life:
            raise UsageError(
                f"an earlier start of job {scheduled} still runs at {error} after {settings.join_timeout:g} s "
                "(--join-timeout), although it was asked to stop; end its agents, then requeue the job"
            ) from None
        raise UsageError(
            f"run {run_id} is already running at {error}, and its agents use the same state directory, "
            f"{settings.state_dir}; give this run another --rdzv-id, or its agents another --state-dir"
        ) from None
