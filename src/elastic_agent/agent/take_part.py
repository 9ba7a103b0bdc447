"""Takes part in a run: this node's session with the store, its workers, and what its users see and command."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack, ExitStack
from functools import partial

from elastic_agent.agent import events
from elastic_agent.agent.control.commands import Commands
from elastic_agent.agent.control.socket import ControlSocket
from elastic_agent.agent.reporting.run_observer import RunObserver
from elastic_agent.agent.slurm.job import with_missing_nodes
from elastic_agent.agent.worker_group.collectives import Collectives
from elastic_agent.agent.worker_group.command import fingerprint
from elastic_agent.agent.worker_group.heartbeat_files import sweep_heartbeat_files
from elastic_agent.agent.worker_group.runner import Runner
from elastic_agent.logs import get_logger
from elastic_agent.protocol import RECORD_VERSION, Member, Outcome, Plan, State, Waiting
from elastic_agent.rendezvous.session import Session
from elastic_agent.transport import DiskThread
from elastic_agent.values import new_incarnation

from .find_run import recall
from .identity import NodeIdLock, acquire_node_id, prune_node_ids, using_state_dir
from .local_node import LocalNode
from .supervisor import Ending, Supervisor
from .tasks import BackgroundTasks

RECORD_TIMEOUT_S = 1.0
"""The time that the disk has to take the record of this node's processes."""

LAST_ANSWERS_S = 2.0
"""The time for sending the last answers to ``drain`` and ``stop``."""


async def take_part(node: LocalNode, held: ExitStack) -> Ending:
    """Take part until that is over; with a derived node id that turns out to be taken elsewhere, try the next one.

    What other agents may have when nothing of this one is left is given back by ``held``; the node id of a node that
    was drained at once.

    Raises:
        IdentityError: the node id cannot be taken.
        UsageError: the state directory cannot be used.
    """
    refused: frozenset[str] = frozenset()
    sweep_heartbeat_files()
    held.callback(prune_node_ids, node.settings.state_dir / "nodes")
    while True:
        with using_state_dir(node.settings.state_dir):
            lock = acquire_node_id(node.folder, node.settings.node_id, refused)
        held.callback(lock.release)
        node.is_called(lock.node_id)
        if lock.warning and not refused:
            get_logger().warning(lock.warning)
        ending = await _take_part_as(node, lock)
        if ending.outcome is Outcome.DRAINED:
            lock.release()  # another agent may be started under it, also while this one hosts on
        if lock.explicit or ending.outcome is not Outcome.NODE_ID_HELD:
            return ending
        get_logger().info(f"{ending.reason}; trying the next free node id")
        refused |= {lock.node_id}
        lock.release()


async def _take_part_as(node: LocalNode, lock: NodeIdLock) -> Ending:
    """Take part under this node id."""
    history = await recall(node)
    incarnation = new_incarnation()
    session = Session(
        node.backend,
        _member_record(node, lock, incarnation),
        node.settings.lease_ttl,
        node.settings.local_addr,
        join_timeout_s=node.settings.join_timeout,
    )
    session.history = history.as_history if history is not None else None
    async with AsyncExitStack() as closing:
        collectives = Collectives(lambda slots: observer.training.warn_of_copies(slots))
        collectives.open()
        supervisor = _supervisor(node, lock, session, collectives)
        goes_on = history is not None and node.job.continues(history)
        observer = RunObserver(node, supervisor, collectives, goes_on=goes_on)
        node.publish(events.AgentStarted(incarnation, os.getpid(), node.slots))
        node.console.read_status = partial(_status, session)
        node.console.newest_step = lambda: supervisor.progress.reported_step if supervisor.progress else 0
        node.signals.attend(supervisor)
        control = await _listen(Commands(node, supervisor, observer))
        if control is not None:
            closing.push_async_callback(control.close, LAST_ANSWERS_S)
        closing.callback(collectives.close)
        closing.callback(observer.close)
        observer.open_page()
        tasks = BackgroundTasks()
        closing.callback(tasks.cancel)
        tasks.start(observer.questions.serve())
        closing.callback(observer.questions.close)
        ending = _with_own_part(node, await supervisor.run(), supervisor, history)
        await observer.conclude(ending.outcome, ending.reason)
    node.publish(events.AgentEnded(ending.outcome, ending.reason))
    return ending


# -- the parts ------------------------------------------------------------------------------------


def _member_record(node: LocalNode, lock: NodeIdLock, incarnation: str) -> Member:
    """Return the first record of this incarnation."""
    settings = node.settings
    return Member(
        version=RECORD_VERSION,
        node_id=lock.node_id,
        incarnation=incarnation,
        address=settings.local_addr or "127.0.0.1",  # the session puts the right one in when connected
        slots=node.slots,
        state=State.READY,
        generation=0,
        policy=node.policy,
        stop_s=settings.shutdown_timeout,
        replaces=(lock.predecessor,) if lock.predecessor else (),
        preferred_rank=settings.node_rank,
        role=settings.role,
        fingerprint=fingerprint(settings),
        warms_up=node.workers.keeps_workers,
    )


def _supervisor(node: LocalNode, lock: NodeIdLock, session: Session, collectives: Collectives) -> Supervisor:
    disk = DiskThread("node-record")
    runner = Runner(
        node.guards,
        lock.node_id,
        node.settings,
        node.signals.stop_signals,
        collectives,
        sends_notice_signal=node.scheduled is None,
    )

    async def write_down(incarnation: str) -> None:
        record = partial(lock.record, incarnation, node.guards.processes)
        await disk.call_async("seat", record, RECORD_TIMEOUT_S)

    return Supervisor(
        session,
        runner,
        partial(node.workers.make, run_id=node.run_id, asked_by=collectives.address),
        publish=node.publish,
        remember=node.backend.remember,
        write_down=write_down,
    )


async def _listen(commands: Commands) -> ControlSocket | None:
    """Carry out what users of this machine command."""
    try:
        return await ControlSocket.open(commands.act)
    except OSError as error:
        get_logger().warning(
            "control socket unavailable: elastic-agent status, why, logs, stacks, drain, stop do not reach this agent",
            reason=str(error),
        )
        return None


async def _status(session: Session) -> Waiting:
    return with_missing_nodes(await session.status(), os.environ)


# -- what the outcome means here ------------------------------------------------------------------


def _with_own_part(node: LocalNode, ending: Ending, supervisor: Supervisor, history: Plan | None) -> Ending:
    """Return a refusal in place of a success of workers that ran something else than this node was given."""
    plan = ending.plan
    if ending.outcome is not Outcome.FINISHED or plan is None or supervisor.world is not None:
        return ending
    difference = node.job.difference(plan.policy.job)
    if (not difference and _is_news(node, plan, history)) or node.policy.skips(plan):
        return ending
    when = difference or " before this agent was started"
    reason = f"the run finished{when}; what this agent was given was not run: start it again in a minute"
    return Ending(Outcome.REFUSED, reason, plan=plan)


def _is_news(node: LocalNode, plan: Plan, history: Plan | None) -> bool:
    """Return whether no agent of this machine had ended with this outcome when this one began to take part.

    If this agent's own store reports the outcome, then the one before it was killed, and this one ends for it.
    """
    if history is None or node.backend.is_host:
        return True
    return (history.phase, history.generation) != (plan.phase, plan.generation)
