"""After the end: whether the job is requeued, and by which agent.

The decision is pure; ``requeue`` carries it out. The job is requeued when it was stopped because its time ran out
or because another job takes its place, with the training state saved; never when the run finished, failed or was
stopped by a person.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_agent.agent.events import Requeued
from elastic_agent.agent.run_command import CommandError
from elastic_agent.config.settings import Settings
from elastic_agent.protocol import Cause, Plan

from .job import SlurmJob, run_requeue_command

REASONS = frozenset({Cause.PREEMPTED, Cause.WALLTIME})
"""The reasons for a stop after which a job is requeued."""


MOST_REQUEUES = 100
"""The limit on requeues of a job, those by others included."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision on requeueing, and the sentence for the log; empty: nothing to log."""

    act: bool
    why: str = ""
    requeued: bool = False
    """The job is requeued, by this agent or another one."""


def decide(settings: Settings, job: SlurmJob | None, reason: str, *, is_chosen: bool) -> Decision:
    """Return whether this agent requeues the job, and why (not).

    Args:
        settings: of the run.
        job: that this agent is a task of.
        reason: why the run was stopped, every rank having saved: preempted, walltime, drain, grow, operator. Empty: it
            finished, failed, or this node alone left it.
        is_chosen: this node's agent is the one that requeues (the plan's requeuer).
    """
    if reason not in REASONS:
        return Decision(False)
    if settings.requeue == "never":
        return _not("--requeue is never")
    if job is None and not settings.requeue_command:
        return _not("this is not a Slurm job step, and --requeue-command is not set")
    if not is_chosen:
        return Decision(False, "the agent of another node requeues the job", requeued=True)
    requeues = job.requeues if job is not None else 0
    if requeues >= MOST_REQUEUES:
        return _not(f"it has been requeued {requeues} times, which is the limit")
    why = f"requeueing the job ({reason}, requeue {requeues + 1} of at most {MOST_REQUEUES})"
    return Decision(True, why, requeued=True)


def how_to_resume(settings: Settings, run_id: str, job: SlurmJob | None) -> str:
    """Return what a user does to resume a run that was stopped and is not requeued, in one line."""
    if job is not None:
        return f"to resume the run, submit the job again with --rdzv-id {run_id}"
    # Also where it was given: by --hosts, which generates one if the user has not.
    where = ", on every node" if settings.nnodes.most > 1 else ""
    return f"to resume the run, start it again with the same command and --rdzv-id {run_id}{where}"


def how_to_join_again(plan: Plan | None, job: SlurmJob | None, where: str) -> str:
    """Return what a user does to have a node that has left a run take part again, as a clause; empty: the run is over.

    In a Slurm job, another step has another run id and other nodes.
    """
    if job is not None or (plan is not None and plan.is_terminal):
        return ""
    return f"; to have it join again, start the same command {where} again"


def _not(why: str) -> Decision:
    return Decision(False, f"not requeueing the job: {why}")


async def requeue(settings: Settings, job: SlurmJob | None) -> Requeued:
    """Put the job back into the queue. Slurm may end this process before this returns."""
    try:
        if settings.requeue_command:
            did = await run_requeue_command(settings.requeue_command)
        else:
            assert job is not None  # decided so
            did = await job.requeue()
    except CommandError as error:
        name = f"job {job.id}" if job is not None else "the job"
        return Requeued(
            True, f"cannot requeue {name}: {error}; its state is saved: requeue or submit it again to resume"
        )
    return Requeued(False, f"requeued the job: {did}")
