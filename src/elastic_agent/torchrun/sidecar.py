"""Takes part in a run for a stock torchrun, in a process beside it (see :mod:`.handler` for why).

    waiting ──world sealed──▶ gathering ──all nodes join──▶ torchrun runs its workers ──▶ finishing ──▶ Leave
       ▲                          │ cancelled                      │ Stale
       └──────────────────────────┴────────── NextWorld ◀──────────┘

torchrun exchanges ranks over the bootstrap store without checking whether a node has died meanwhile, so it gets the
world only after the sidecars of all its nodes have joined at that store (*gathering*). Whether they have, or
whether one of them saw the world end before, is decided by one compare-and-set on that store.

The node's state machine is the same as the agent's. Workers count as started when torchrun is about to start them,
and as stopped when torchrun requests the next world.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Coroutine
from dataclasses import dataclass

from elastic_agent.linux import read_process
from elastic_agent.logs import bind_context, configure_logging, get_logger
from elastic_agent.name_lookups import shorten_lookups
from elastic_agent.protocol import Activity, Address, Failure, FailureKind, Outcome, Phase, Plan, State, World
from elastic_agent.protocol import node as machine
from elastic_agent.rendezvous import events
from elastic_agent.rendezvous.asyncio_runner import in_time
from elastic_agent.rendezvous.backends import open_backend
from elastic_agent.rendezvous.participant import Participant, Reporter, Workers
from elastic_agent.rendezvous.run_history import RunHistoryStore, c10d_store
from elastic_agent.rendezvous.session import Session
from elastic_agent.transport import Obstacle, Secret, StoreLostError, TransportError, run_abandonable
from elastic_agent.transport.c10d import ServeStore, StoreServers
from elastic_agent.values import new_incarnation

from .barrier import Gathering
from .messages import Begin, Channel, Finishing, FromTorchrun, Leave, NextWorld, Over, Sealed, Stale, Trouble

LEAVE_TIMEOUT_S = 10.0
"""How long others are waited for at most when torchrun ends: their acknowledgements, the outcome."""

START_S = 60.0
FLUSH_S = 2.0
STORE_CALL_S = 5.0
UNREACHABLE_S = 5.0
"""If the store has not answered for this long, the reason is logged; at once if its name does not resolve."""

NOTICE_S = 10.0
"""If torchrun's exit takes longer than this, the reason is logged."""


@dataclass
class _Presence:
    """This node's presence at the bootstrap store of one world."""

    world: World
    rank: int
    gathering: Gathering | None = None
    called_off: bool = False
    let_go: bool = False
    """torchrun got this world."""

    def close(self) -> None:
        """Give up the connection; who waits for the other nodes gets a StoreLostError."""
        if self.gathering is not None:
            self.gathering.close()


class Sidecar:
    """One torchrun's part in the run."""

    def __init__(
        self, begin: Begin, channel: Channel[FromTorchrun], torchrun: int, serve: ServeStore
    ) -> None:
        """``torchrun``: the process that started this one; ``serve``: serves stores."""
        policy = begin.member.policy
        self._member = begin.member
        self._channel = channel
        self._backend = open_backend(
            begin.endpoint,
            begin.etcd,
            begin.state_dir,
            lease_ttl_s=policy.lease_ttl_s,
            fence_margin_s=policy.fence_margin_s,
            port_range=begin.port_range,
            secret=Secret(begin.secret) if begin.secret else None,
            serve=serve,
        )
        self._backend.history_store = RunHistoryStore(begin.state_dir, _store(begin))
        self._backend.run_id = begin.run_id
        self._backend.history_store.settle(begin.run_id)  # a torchrun that is started again is a new run
        self._session = Session(self._backend, begin.member, policy.lease_ttl_s, begin.local_addr)
        self._participant = Participant(
            self._session,
            Workers(
                set_deadline=_ignore,  # torchrun's workers cannot be fenced
                start=self._start_workers,
                stop=lambda action: self._stop(),
                notify=_ignore,  # torchrun cannot give its workers a notice
            ),
            Reporter(announced=_ignore, rejoins=_ignore, departs=self._over),
            new_incarnation,
        )
        self._node = self._participant.node
        self._perform = self._participant.perform
        self._session.listen(self._event)
        self._torchrun = torchrun
        self._session.renew_only_if(self._torchrun_runs)
        self._presence: _Presence | None = None
        self._asked = False
        """torchrun waits for a world."""
        self._finishing = False
        self._outcome: asyncio.Future[Plan | None] = asyncio.get_running_loop().create_future()
        """While finishing: the run's end, or None when the others continue without this node."""
        self._met = False
        self._trouble = ""
        """What torchrun was told last."""
        self._warning: asyncio.TimerHandle | None = None
        """That the store does not answer, to be given or given."""
        self._ended: machine.Depart | None = None
        self._leaving: asyncio.Future[Leave] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = get_logger()

    async def run(self, first: list[FromTorchrun]) -> None:
        """Run until torchrun has sent Leave and the others need nothing more of this node.

        Args:
            first: the messages of torchrun received already.

        Raises:
            EOFError: torchrun exited without a message.
        """
        for message in first:
            self._take(message)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._channel.fileno(), self._received)
        self._watch_torchrun()
        session = asyncio.create_task(self._session.run())
        session.add_done_callback(self._task_ended)
        message = await self._leaving
        if message.succeeded or self._finishing:
            await self._part_in_peace()
        else:
            self._leave("torchrun exited")
        await self._session.flush(FLUSH_S)
        session.cancel()
        await asyncio.gather(session, return_exceptions=True)
        hosting = self._host_on()
        await (hosting if message.succeeded else _at_most(hosting, LEAVE_TIMEOUT_S))
        await self._backend.leave()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Only an error of our own ends a task by an exception."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._leaving.done():
            self._leaving.set_exception(error)

    # -- torchrun -------------------------------------------------------------------------------

    def _received(self) -> None:
        try:
            for message in self._channel.arrived():
                self._take(message)
        except EOFError as error:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            if not self._leaving.done():
                self._leaving.set_exception(error)

    def _watch_torchrun(self) -> None:
        """Notice when it is killed: the channel stays open while a process that it forked has inherited its end."""
        try:
            ended = os.pidfd_open(self._torchrun)
        except ProcessLookupError:
            raise EOFError from None
        if os.getppid() != self._torchrun:
            raise EOFError
        asyncio.get_running_loop().add_reader(ended, self._torchrun_gone, ended)

    def _torchrun_gone(self, ended: int) -> None:
        asyncio.get_running_loop().remove_reader(ended)
        os.close(ended)
        if not self._leaving.done():
            self._leaving.set_exception(EOFError())

    def _torchrun_runs(self) -> bool:
        """Whether torchrun lives and is not stopped (by a signal, a debugger): then it can stop its workers."""
        torchrun = read_process(self._torchrun)
        return torchrun is not None and os.getppid() == self._torchrun and not torchrun.frozen

    def _take(self, message: FromTorchrun) -> None:
        match message:
            case NextWorld():
                self._want_world()
            case Finishing():
                self._finish()
            case Leave() if not self._leaving.done():
                self._leaving.set_result(message)
            case _:
                pass

    def _want_world(self) -> None:
        self._asked = True
        self._forget_presence()
        if self._ended is not None:
            self._report_over(self._ended)
            return
        if self._node.activity in (Activity.STARTING, Activity.RUNNING):
            reason = f"{self._member.node_id}: torchrun is restarting its workers"
            self._perform(self._node.failed(self._node.generation, Failure(FailureKind.WORKER, reason)))
        self._workers_stopped()

    def _finish(self) -> None:
        """torchrun's workers are done; it will not request another world."""
        self._finishing = True
        if self._node.activity is Activity.RUNNING:
            self._perform(self._node.succeeded(self._node.generation))
        else:
            self._leave("torchrun's workers exited while their world was ending")

    def _leave(self, why: str) -> None:
        """torchrun has no workers any more."""
        self._perform(self._node.drain(why))
        self._workers_stopped()

    def _workers_stopped(self) -> None:
        """torchrun has no workers any more, if it had any."""
        if self._node.activity is Activity.STOPPING:
            self._perform(self._node.stopped())

    # -- the run --------------------------------------------------------------------------------

    def _event(self, event: events.SessionEvent) -> None:
        match event:
            case events.Connected():
                self._met = True
                self._store_answers()
                self._tell_trouble("")
            case events.Disconnected(reason=reason, obstacle=obstacle):
                self._store_is_silent(reason, obstacle)
                self._tell_trouble(reason)
            case events.Unusable(reason=reason):
                self._tell_trouble(reason)
                if not self._met:
                    self._over(machine.Depart(Outcome.UNREACHABLE, reason))
            case events.OtherVersion(reason=reason):
                self._over(machine.Depart(Outcome.UNREACHABLE, reason))
            case events.PlanSeen(plan=plan) if self._finishing:
                self._settle_by(plan)
                return
            case events.LeaseLost(reason=reason):
                why = (
                    reason
                    if self._torchrun_runs()
                    else "torchrun is stopped (by SIGSTOP, a terminal or a debugger)"
                )
                self._log.warning("this node lost its lease", reason=why)
                if self._finishing:
                    self._settle(None)
                    return
            case _:
                pass
        self._participant.take_in(event)

    def _tell_trouble(self, reason: str) -> None:
        """Only what is new: a torchrun that is stopped reads nothing, and what comes after must find room."""
        if reason != self._trouble:
            self._trouble = reason
            self._channel.send(Trouble(reason))

    def _store_is_silent(self, reason: str, obstacle: Obstacle) -> None:
        """torchrun tells only when its time-out is over, after ten minutes."""
        if self._warning is None:
            wait_s = 0.0 if obstacle is Obstacle.UNKNOWN_NAME else UNREACHABLE_S
            text = f"the store at {self._backend.shown} does not answer, still trying: {reason}"
            self._warning = asyncio.get_running_loop().call_later(wait_s, self._log.warning, text)

    def _store_answers(self) -> None:
        if self._warning is not None:
            self._warning.cancel()
            self._warning = None

    def _settle_by(self, plan: Plan) -> None:
        if plan.phase is Phase.FINISHED:
            self._settle(plan)
        elif plan.phase is Phase.FAILED or plan.generation > self._node.generation:
            # the others start again; torchrun's agent here cannot
            self._session.announce(machine.Announce(State.LEFT, plan.generation))
            self._settle(None)

    def _settle(self, outcome: Plan | None) -> None:
        if not self._outcome.done():
            self._outcome.set_result(outcome)

    def _start_workers(self, world: World) -> None:
        self._perform(self._node.started(world.generation))
        self._start(self._gather(world))

    def _stop(self) -> None:
        """The world is over for this node."""
        presence = self._presence
        if presence is None:
            self._workers_stopped()  # torchrun has no workers
        elif presence.let_go:
            self._channel.send(Stale())
        elif not presence.called_off:
            presence.called_off = True
            self._start(self._call_off(presence))

    def _over(self, ending: machine.Depart) -> None:
        self._ended = ending
        self._report_over(ending)

    def _report_over(self, ending: machine.Depart) -> None:
        unreachable = ending.outcome is Outcome.UNREACHABLE
        reason = ending.reason if unreachable else f"the run is over: {ending.reason}"
        self._channel.send(Over(reason, unreachable))

    # -- gathering at the bootstrap store -------------------------------------------------------

    async def _gather(self, world: World) -> None:
        rank = world.node_rank(self._node.incarnation)
        assert rank is not None  # only seated nodes start
        presence = self._presence = _Presence(world, rank)
        problem = ""
        try:
            presence.let_go = await self._come_together(presence)
        except TransportError as error:
            problem = str(error)
        if not presence.let_go:
            self._not_gathered(world, problem)
            return
        self._asked = False
        self._channel.send(Sealed(rank, len(world.seats), world.bootstrap))
        if self._node.activity is not Activity.RUNNING:
            self._channel.send(Stale())

    async def _come_together(self, presence: _Presence) -> bool:
        world, limit_s = presence.world, self._member.policy.start_timeout_s
        presence.gathering = await Gathering.connect(world.bootstrap, len(world.seats), STORE_CALL_S)
        if presence is not self._presence or presence.called_off:
            presence.close()
        return await in_time(presence.gathering.come(presence.rank, limit_s), limit_s + STORE_CALL_S)

    def _not_gathered(self, world: World, problem: str) -> None:
        """The world ended, or its store was lost, before all nodes had joined: wait for the next one."""
        self._forget_presence()
        if problem and self._node.activity is Activity.RUNNING:
            summary = (
                f"{self._member.node_id} could not connect to the other nodes at {world.bootstrap}: {problem}"
            )
            self._perform(self._node.failed(world.generation, Failure(FailureKind.BOOTSTRAP, summary[:512])))
        self._workers_stopped()

    def _forget_presence(self) -> None:
        if self._presence is not None:
            self._presence.close()
            self._presence = None

    async def _call_off(self, presence: _Presence) -> None:
        """Cancel the barrier, so that nodes that have joined already do not wait for this one."""
        try:
            await in_time(_call_off(presence.world.bootstrap), STORE_CALL_S)
        except TransportError:
            presence.close()

    # -- the end --------------------------------------------------------------------------------

    async def _part_in_peace(self) -> None:
        """The workers succeeded: keep what the others need, and see the outcome if it comes soon."""
        if not self._finishing:
            self._finish()
        presence = self._presence
        if presence is not None and presence.gathering is not None:
            await self._take_leave(presence, presence.gathering)
        if self._ended is not None:
            return
        with contextlib.suppress(TimeoutError):
            outcome = await asyncio.wait_for(self._outcome, LEAVE_TIMEOUT_S)
            if outcome is not None:
                self._perform(self._node.plan_changed(outcome))

    async def _take_leave(self, presence: _Presence, gathering: Gathering) -> None:
        """torchrun has passed its exit barrier here; the node that hosts it waits until all have."""
        offer = self._session.offer
        hosts = offer is not None and offer.address == presence.world.bootstrap
        with contextlib.suppress(StoreLostError):
            await in_time(gathering.go(presence.rank), STORE_CALL_S)
            if hosts:
                await in_time(gathering.see_all_gone(LEAVE_TIMEOUT_S), LEAVE_TIMEOUT_S + 1.0)

    async def _host_on(self) -> None:
        """A host keeps serving until no run needs its store any more."""
        notice = asyncio.get_running_loop().call_later(NOTICE_S, self._log_why_not_ended)
        while self._backend.busy_with:
            await self._backend.changed()
        notice.cancel()

    def _log_why_not_ended(self) -> None:
        runs = ", ".join(self._backend.busy_with)
        self._log.warning(
            f"torchrun is done; keeping the rendezvous store at {self._backend.shown} up for {runs}"
        )

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)


async def _call_off(address: Address) -> None:
    gathering = await Gathering.connect(address, 0, STORE_CALL_S)
    try:
        await gathering.call_off()
    finally:
        gathering.close()


def _store(begin: Begin) -> str:
    """Distinguishes this run from others with the same id: torchrun's default id is the same for all."""
    if begin.etcd is None:
        return c10d_store(begin.endpoint.port)
    return f"etcd {begin.endpoint}"


def _ignore(*_: object) -> None:
    pass


async def _at_most(work: Coroutine[None, None, None], timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(work, timeout_s)


async def _live(channel: Channel[FromTorchrun], torchrun: int) -> None:
    channel.wait(START_S)
    begin, *more = channel.arrived()
    assert isinstance(begin, Begin)  # it always comes first
    configure_logging("console", begin.log_level, sys.stderr)
    bind_context(run=begin.run_id, node=begin.member.node_id)
    stores = StoreServers(None)
    try:
        # Before a port is bound: a store that is not served yet does not answer.
        await run_abandonable(stores.await_ready, START_S)
        await Sidecar(begin, channel, torchrun, stores.serve).run(more)
    finally:
        stores.close()


def main() -> int:
    """The process's life; its arguments are the descriptor of its end of the channel, and torchrun's process id."""
    shorten_lookups()
    channel: Channel[FromTorchrun] = Channel(socket.socket(fileno=int(sys.argv[1])), FromTorchrun)
    try:
        asyncio.run(_live(channel, int(sys.argv[2])))
    except EOFError:
        return 1  # torchrun was killed: the others see the lease expire
    except Exception:
        get_logger().exception("internal error of the rendezvous for torchrun")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
