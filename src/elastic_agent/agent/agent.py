"""The elastic agent of one node: assembles the components and runs the node to the end of its part in the run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from elastic_agent.agent import events
from elastic_agent.agent.control.commands import Commands
from elastic_agent.agent.control.socket import ControlSocket
from elastic_agent.agent.reporting.console import ConsoleReporter
from elastic_agent.agent.reporting.copies import CopiesWarning
from elastic_agent.agent.reporting.event_command import EventCommand
from elastic_agent.agent.reporting.event_log import EventLog
from elastic_agent.agent.reporting.log_lines import log_event
from elastic_agent.agent.reporting.node_comparison import start_facts
from elastic_agent.agent.reporting.outcome_file import OutcomeFile
from elastic_agent.agent.reporting.run_observer import RunObserver
from elastic_agent.agent.reporting.start_check import StartCheck
from elastic_agent.agent.reporting.systemd import SystemdReporter
from elastic_agent.agent.slurm.job import SlurmJob
from elastic_agent.agent.slurm.nodes import with_missing_nodes
from elastic_agent.agent.slurm.requeue import (
    decide,
    how_to_join_again,
    how_to_resume,
    requeue,
    rescue,
)
from elastic_agent.agent.worker_group.collectives import Collectives
from elastic_agent.agent.worker_group.command import command_on_this_machine, job_fingerprint, job_of
from elastic_agent.agent.worker_group.factory import WorkerFactory, logs_specs, numa_options
from elastic_agent.agent.worker_group.heartbeat_files import sweep_heartbeat_files
from elastic_agent.agent.worker_group.interruptions import StopSignals
from elastic_agent.agent.worker_group.warm_start import is_warm, spawner_config
from elastic_agent.config.errors import UsageError
from elastic_agent.config.settings import Settings
from elastic_agent.config.value_types import NO_SIGNAL
from elastic_agent.diagnosis.signals import signal_name
from elastic_agent.linux import start_ticks
from elastic_agent.logs import bind_context, get_logger
from elastic_agent.protocol import (
    FINISHED_BEFORE,
    Cause,
    History,
    Outcome,
    Plan,
    Policy,
    Seat,
    Waiting,
)
from elastic_agent.rendezvous.backends.base import RendezvousBackend
from elastic_agent.rendezvous.disk_thread import DiskThread
from elastic_agent.rendezvous.session import Session
from elastic_agent.rendezvous.waits import in_time
from elastic_agent.sd_notify import SystemdNotifier
from elastic_agent.transport import NotAStoreError, TransportError
from elastic_agent.transport.c10d import StoreServers
from elastic_agent.values import new_incarnation
from elastic_agent.worker_variables import LAUNCH_FOLDER
from elastic_agent.workers.context import BackgroundCloser
from elastic_agent.workers.guard.client import Guard, kill_orphans
from elastic_agent.workers.output.generation_logs import GenerationLogs
from elastic_agent.workers.spawner.curated import current_folder

from .backend import agree_on_run
from .identity import IdentityError, NodeIdLock, acquire_node_id, prune_node_ids
from .member import member_record
from .run_claim import ClaimedEndpoint, OtherCommandError, RunClaim, RunElsewhereError
from .signals import Meanings, SignalDesk
from .state_dir import using_state_dir
from .supervisor import Ending, Graces, Parts, Supervisor
from .tasks import BackgroundTasks

RELEASE_S = 5.0
"""How long to try to remove a finished run's name from the store, if it was agreed for the job."""

RECORD_TIMEOUT_S = 1.0
"""How long the disk may take to take the record of this node's processes."""

LOOK_EVERY_S = 2.0
"""How often an agent in a scheduler's job looks whether a later life of the job waits for its end."""

LAST_ANSWERS_S = 2.0
"""How long sending the last answers to ``drain`` and ``stop`` may take."""

OUTPUT_PATIENCE_S = 5.0
"""How long writing the last lines of workers' output may take at the end."""


ORPHANS_S = 2.0
"""How long processes may take to end whose guard has died."""


class EndedAtOnceError(Exception):
    """A second signal: the agent exits at once."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"terminated by {signal_name(-signum)}")
        self.signum = signum


class Agent:
    """The agent of one node."""

    def __init__(
        self,
        settings: Settings,
        slots: int,
        guard: Guard,
        stores: StoreServers,
        backend: RendezvousBackend,
        manager: SystemdNotifier,
        stop_signals: StopSignals,
    ) -> None:
        """``guard`` was started already, so that it is up by the time the world is agreed."""
        self._settings = settings
        self._slots = slots
        self._guard = guard
        self._stores = stores
        self._backend = backend
        self._event_log = EventLog(settings.event_journal)
        self._log = get_logger()
        self._logs = logs_specs(settings, slots)
        self._numa_options = numa_options(settings.numa_binding)
        self._closer = BackgroundCloser()
        self._disk = DiskThread("node-record")
        self._console = ConsoleReporter(lambda: backend.shown, self._status, backend.how_to_reach)
        self._start_check: StartCheck | None = None
        self._systemd = SystemdReporter(manager, self._headline)
        self._publish = events.Publisher(log_event, self._event_log.on_event, self._systemd.on_event)
        if folder := os.environ.get(LAUNCH_FOLDER):
            self._publish.subscribe(OutcomeFile(Path(folder), self._seat).on_event)
        self._supervisor: Supervisor | None = None
        self._session: Session | None = None
        self._node_id_lock: NodeIdLock | None = None
        self._claim: RunClaim | None = None
        self._known: History | None = None
        """The history of the run on this machine's disk, when this agent began to take part."""
        self._job = SlurmJob.from_environment(os.environ)
        self._runs = job_of(settings, self._job)
        self._stop_signals = stop_signals
        self._signals = SignalDesk(
            Meanings(settings.signals_to_handle, settings.notice_signal, settings.notice_time),
            self._job,
            stop_signals,
            publish=self._publish,
            end_at_once=self._end_at_once,
            depending=self._depending,
        )
        self._main_task: asyncio.Task[Ending] | None = None

    def run(self) -> Ending:
        """Run the node until its part in the run is over.

        Raises:
            EndedAtOnceError: a second signal came.
            IdentityError: the node id cannot be taken.
            UsageError: the state directory cannot be written.
        """
        try:
            ending = asyncio.run(self._main())
            self._systemd.ended(
                f"{ending.outcome.value}: {ending.reason}",
                in_order=ending.outcome in (Outcome.FINISHED, Outcome.DRAINED, Outcome.STOPPED),
            )
            return ending
        except IdentityError as error:
            self._not_started(str(error))
            raise
        except asyncio.CancelledError:
            raise EndedAtOnceError(self._signals.leave_signals[-1]) from None
        finally:
            self._tidy()

    # -- life -----------------------------------------------------------------------------------

    async def _main(self) -> Ending:
        self._main_task = asyncio.current_task()
        self._signals.open()
        self._publish.subscribe(self._console.on_event)
        start_check = self._start_check = StartCheck(self._settings, os.environ)
        self._publish.subscribe(start_check.on_event)
        self._systemd.start()
        try:
            begun = await self._begin()
            if isinstance(begun, Ending):
                self._not_started(begun.reason)
                return begun
            ending = (await self._until_over(begun)).with_remedy(self._console.remedy)
            if ending.outcome in (Outcome.FINISHED, Outcome.FAILED, Outcome.STOPPED):
                with contextlib.suppress(TransportError):  # the store is gone, and the agreement with it
                    await in_time(self._backend.release(), RELEASE_S)
            if ending.outcome is Outcome.DRAINED:
                self._release_node_id()
                self._log.info(
                    f"this node has left the run: {ending.reason}{how_to_join_again(ending.plan, self._job, 'here')}"
                )
            await self._host_on()
            self._backend.run_ended()
            await self._requeue(ending)
            return ending
        finally:
            start_check.close()
            self._console.close()
            await self._backend.leave()
            self._signals.close()

    async def _begin(self) -> str | Ending:
        """Find the run, and become one of its agents; its id, or why this agent takes no part."""
        while True:
            agreed = await self._agree_on_run()
            if isinstance(agreed, Ending):
                return agreed
            bind_context(run=agreed)
            self._event_log.bind(run=agreed)
            if await self._has_finished_before(agreed):
                self._log.info(f"the run finished: {FINISHED_BEFORE}")
                return Ending(Outcome.FINISHED, FINISHED_BEFORE)
            claim = await self._claim_run(agreed)
            if self._settings.rdzv_id is not None or not claim.has_waited:
                self._claim = claim
                return agreed
            claim.release()  # the run that was in the way has ended, and its generated id with it

    def _not_started(self, reason: str) -> None:
        self._publish(events.NotStarted(reason))

    async def _agree_on_run(self) -> str | Ending:
        """The run's id: given, or agreed with the other agents at the endpoint."""
        settings = self._settings
        if settings.rdzv_id is not None:
            self._backend.run_id = settings.rdzv_id
            return settings.rdzv_id
        agreeing = agree_on_run(self._backend, job_fingerprint(settings), self._publish)
        with using_state_dir(settings.state_dir):
            try:
                return await asyncio.wait_for(agreeing, settings.join_timeout)
            except TimeoutError:
                reason = (
                    f"no store answered at {self._backend.shown} within {settings.join_timeout:g} s: "
                    f"{self._console.last_problem or 'connecting did not complete'}"
                )
                return Ending(Outcome.UNREACHABLE, reason).with_remedy(self._console.remedy)
            except NotAStoreError as error:
                return Ending(Outcome.UNREACHABLE, str(error))

    async def _has_finished_before(self, run_id: str) -> bool:
        """Whether the run has finished and is not run again, by the local run history: no store is needed to find out.

        The agent that would host the store reads the same history, and may have ended before this one dials.
        """
        history = await self._recall(run_id)
        return history is not None and history.settled and self._policy().skips(history)

    def _policy(self) -> Policy:
        return msgspec.structs.replace(self._settings.policy(), job=self._runs)

    async def _until_over(self, run_id: str) -> Ending:
        """Take part; with a derived node id that turns out to be taken elsewhere, try the next one."""
        folder = self._folder(run_id)
        refused: frozenset[str] = frozenset()
        sweep_heartbeat_files()
        while True:
            with using_state_dir(self._settings.state_dir):
                lock = self._node_id_lock = acquire_node_id(folder, self._settings.node_id, refused)
            bind_context(node=lock.node_id)
            self._console.node_id = lock.node_id
            self._event_log.bind(node=lock.node_id)
            if lock.warning and not refused:
                self._log.warning(lock.warning)
            ending = await self._take_part(run_id, lock)
            if lock.explicit or ending.outcome is not Outcome.NODE_ID_HELD:
                return ending
            self._log.info(f"{ending.reason}; trying the next free node id")
            refused |= {lock.node_id}
            self._node_id_lock = None
            lock.release()

    def _folder(self, run_id: str) -> Path:
        return self._settings.state_dir / "nodes" / run_id

    async def _claim_run(self, run_id: str) -> RunClaim:
        settings, folder = self._settings, self._folder(run_id)
        command = command_on_this_machine(settings)
        endpoint = settings.rdzv_endpoint, settings.rdzv_backend
        try:
            with using_state_dir(settings.state_dir):
                looked_up = self._disk.submit(
                    "claim", lambda: ClaimedEndpoint.of(*endpoint, command, self._runs)
                )
                claimed = await asyncio.wrap_future(looked_up)
                return await RunClaim.await_turn(folder, claimed, settings.join_timeout, self._waits)
        except OtherCommandError as error:
            raise UsageError(
                f"this agent was given `{command}`, but run {run_id} at {settings.rdzv_endpoint} runs `{error}` on "
                "this machine; give this one another --rdzv-id, or wait until that run has ended"
            ) from None
        except RunElsewhereError as error:
            if error.is_earlier_life:
                raise UsageError(
                    f"an earlier start of job {self._runs.scheduled} still runs at {error} after "
                    f"{settings.join_timeout:g} s (--join-timeout), although it was asked to stop; end its agents, "
                    "then requeue the job"
                ) from None
            raise UsageError(
                f"run {run_id} is already running at {error}, and its agents use the same state "
                f"directory, {settings.state_dir}; give this run another --rdzv-id, or its agents "
                "another --state-dir"
            ) from None

    def _waits(self, refusal: RunElsewhereError) -> None:
        if self._start_check is not None:  # it is known why the run does not start
            self._start_check.close()
        self._log.info(
            f"an earlier start of job {self._runs.scheduled} still runs at {refusal}; it was asked to save and "
            f"stop; waiting up to {self._settings.join_timeout:g} s for its end"
        )

    async def _stop_for_next_life(self, supervisor: Supervisor) -> None:
        """Stop the run when the scheduler has started the job again: that start waits for the end of this one."""
        while not await self._is_to_stop():
            await asyncio.sleep(LOOK_EVERY_S)
        words = f"job {self._runs.scheduled} was started again"
        self._log.info(f"{words}: stopping the run here; its workers get a notice to save")
        supervisor.stop(Cause.OPERATOR, self._settings.notice_time, words)

    async def _is_to_stop(self) -> bool:
        if self._job is None or self._claim is None:
            return False
        try:
            return await self._disk.call_async("stop-request", self._claim.is_to_stop, RECORD_TIMEOUT_S)
        except OSError:  # the disk does not answer; the next look may tell
            return False

    async def _recall(self, run_id: str) -> History | None:
        with using_state_dir(self._settings.state_dir):
            return await self._backend.history_store.load(run_id)

    async def _take_part(self, run_id: str, lock: NodeIdLock) -> Ending:
        settings = self._settings
        incarnation = new_incarnation()
        member = member_record(settings, self._policy(), self._slots, lock, incarnation)
        session = self._session = Session(self._backend, member, settings.lease_ttl, settings.local_addr)
        history = session.history = self._known = await self._recall(run_id)
        collectives = Collectives(CopiesWarning(lambda: supervisor.world, self._seat))
        collectives.open()
        supervisor = self._supervisor = Supervisor(self._parts(run_id, lock, session, collectives))
        observer = RunObserver(
            run_id,
            lock.node_id,
            self._backend,
            supervisor,
            self._publish,
            settings.state_dir,
            goes_on=history is not None and self._runs.continues(history),
            facts=start_facts(settings.script_args, os.environ),
            log_dir=self._log_dir(run_id),
            remedy=lambda: self._console.remedy,
        )
        self._publish(events.AgentStarted(incarnation, os.getpid(), self._slots))
        self._signals.attend(supervisor, lock.node_id)
        commands = Commands(
            supervisor,
            run_id,
            lock.node_id,
            settings.shutdown_timeout,
            settings.notice_time,
            hosts_store=lambda: bool(self._backend.busy_with),
            depending=lambda: self._depending(lock.node_id),
            is_at_store=self._backend.is_at_store,
            store_problem=self._store_problem,
            status=observer.status,
            join_again=how_to_join_again(None, self._job, "there"),
        )
        control = await self._listen(commands)
        on_event = None
        if settings.on_event is not None:
            on_event = EventCommand(settings.on_event, run_id, lock.node_id)
            self._publish.subscribe(on_event.on_event)
        observer.open_page(settings.status_port)
        tasks = BackgroundTasks()
        if self._job is not None:
            tasks.start(self._stop_for_next_life(supervisor))
        try:
            ending = self._with_own_part(await supervisor.run())
            await observer.conclude(
                ending.outcome,
                ending.reason,
                hosts_readers=self._backend.is_host,
                serves=self._depending(lock.node_id),
            )
        finally:
            tasks.cancel()
            observer.close()
            collectives.close()
            if control is not None:
                await control.close(LAST_ANSWERS_S)
        self._publish(events.AgentEnded(ending.outcome, ending.reason))
        if on_event is not None:
            self._publish.unsubscribe(on_event.on_event)
            await on_event.close()
        return ending

    def _with_own_part(self, ending: Ending) -> Ending:
        """Return a refusal in place of a success of workers that ran something else than this node was given."""
        plan, supervisor = ending.plan, self._supervisor
        has_run = supervisor is not None and supervisor.world is not None
        if ending.outcome is not Outcome.FINISHED or plan is None or has_run:
            return ending
        difference = self._runs.difference(plan.policy.job)
        if (not difference and self._is_news(plan)) or self._policy().skips(plan.history()):
            return ending
        when = difference or " before this agent was started"
        reason = f"the run finished{when}; what this agent was given was not run: start it again in a minute"
        return Ending(Outcome.REFUSED, reason, plan=plan)

    def _is_news(self, plan: Plan) -> bool:
        """Return whether no agent of this machine had ended with this outcome when this one began to take part.

        If this agent's own store reports the outcome, then the one before it was killed, and this one ends for it.
        """
        known = self._known
        if known is None or self._backend.is_host:
            return True
        return (known.outcome, known.generation) != (plan.phase, plan.generation)

    def _parts(self, run_id: str, lock: NodeIdLock, session: Session, collectives: Collectives) -> Parts:
        """The components of this node's supervisor."""
        settings = self._settings
        workers = WorkerFactory(
            settings,
            run_id,
            self._logs,
            self._closer,
            collectives.address,
            current_folder() or "",
            self._numa_options,
        )
        name = settings.notice_signal
        return Parts(
            guard=self._guard,
            session=session,
            publish=self._publish,
            graces=Graces(settings.restart_grace, settings.shutdown_timeout, settings.restart_idle),
            make_workers=workers.make,
            new_guard=self._new_guard,
            remember=self._backend.remember,
            write_down=partial(self._write_down, lock),
            stop_signals=self._stop_signals,
            join_timeout_s=settings.join_timeout,
            hang_timeout_s=settings.hang_timeout,
            collectives=collectives,
            notice_signal=None if name == NO_SIGNAL else int(signal.Signals[name]),
            sends_notice_signal=self._job is None,
        )

    def _log_dir(self, run_id: str) -> str:
        """Where the output of the run's workers is; empty: in no file of ours."""
        choices = self._settings.redirects, self._settings.tee
        has_files = any(choice.of(slot) for choice in choices for slot in range(self._slots))
        if (
            not has_files
            or not isinstance(self._logs, GenerationLogs)
            or self._logs.root_log_dir == os.devnull
        ):
            return ""
        return os.path.join(os.path.abspath(self._logs.root_log_dir), run_id)

    async def _listen(self, commands: Commands) -> ControlSocket | None:
        try:
            return await ControlSocket.open(commands.act)
        except OSError as error:
            self._log.warning(
                "control socket unavailable: elastic-agent status, why, drain and stop will not work for this agent",
                reason=str(error),
            )
            return None

    def _depending(self, node_id: str) -> Sequence[str]:
        """Return the nodes that cannot go on without the store here; a Slurm job without its store is requeued."""
        return self._backend.depending(node_id) if self._job is None else ()

    async def _host_on(self) -> None:
        """A host keeps serving until no run needs its store any more."""
        self._signals.hosting_on = True
        while True:
            runs, nodes = tuple(self._backend.busy_with), self._depending(self._console.node_id)
            self._publish(events.Hosting(runs, tuple(nodes)))
            if not runs:
                return
            await self._backend.changed()

    async def _requeue(self, ending: Ending) -> None:
        """Requeue the job, if it is to be requeued and this agent is the one to do it."""
        if self._supervisor is None:
            return
        done: events.Requeued | None = None
        if ending.outcome is Outcome.UNREACHABLE and self._job is not None:
            done = await rescue(self._settings, self._job)
        plan = ending.plan if ending.outcome is Outcome.STOPPED else None
        reason = plan.notice.cause.value if plan is not None and plan.notice is not None else ""
        is_chosen = plan is not None and plan.requeuer == self._supervisor.node.incarnation
        decision = decide(self._settings, self._job, reason, is_chosen=is_chosen)
        if decision.why:
            self._log.info(decision.why)
        if decision.act:
            done = await requeue(self._settings, self._job)
        if done is not None:
            self._publish(done)
        if plan is None or (plan.world is None and plan.generation < 2):
            return
        if not decision.requeued and not await self._is_to_stop():
            how = how_to_resume(self._settings, self._backend.run_id or "", self._job)
            self._log.info(f"{how}: it goes on from the last checkpoint that the script has written")

    async def _status(self) -> Waiting:
        status = await self._session.status() if self._session is not None else Waiting()
        return with_missing_nodes(status, os.environ)

    def _seat(self) -> Seat | None:
        """Return this node's seat in the world whose workers it runs or ran last."""
        supervisor = self._supervisor
        if supervisor is None or supervisor.world is None:
            return None
        return supervisor.world.seat_of(supervisor.node.incarnation)

    def _headline(self) -> str:
        """The agent's status, for systemd."""
        progress = self._supervisor.progress if self._supervisor is not None else None
        return self._console.headline(max(progress.steps.values(), default=0) if progress is not None else 0)

    def _store_problem(self) -> str:
        """Why the store does not answer, in words; empty: it does."""
        problem = self._console.last_problem
        return problem and f"the store at {self._backend.shown} does not answer: {problem}"

    # -- the node's record ----------------------------------------------------------------------

    async def _write_down(self, lock: NodeIdLock, incarnation: str) -> None:
        record = partial(lock.record, incarnation, self._processes())
        await self._disk.call_async("seat", record, RECORD_TIMEOUT_S)

    def _processes(self) -> list[tuple[int, int]]:
        """The processes that must be gone before a successor starts: the guard, which all workers end with."""
        ticks = start_ticks(self._guard.pid)
        return [(self._guard.pid, ticks)] if ticks is not None else []

    def _new_guard(self) -> Guard:
        # The loop, and so the lease, waits for it.
        kill_orphans(min(ORPHANS_S, self._settings.lease_ttl / 4), self._stores.pid)
        self._guard = Guard.start()
        if is_warm(self._settings):
            self._guard.keep_warm(spawner_config(self._settings, self._slots))
        return self._guard

    # -- the end --------------------------------------------------------------------------------

    def _release_node_id(self) -> None:
        """Another agent may be started under it, also while this one only hosts the store."""
        lock, self._node_id_lock = self._node_id_lock, None
        if lock is not None:
            lock.release()
            prune_node_ids(self._settings.state_dir / "nodes")

    def _end_at_once(self) -> None:
        if self._main_task is not None:
            self._main_task.cancel()

    def _tidy(self) -> None:
        """Nothing of this agent's is left afterwards; the last output has come out."""
        with contextlib.suppress(OSError, ValueError):
            self._guard.close()
        kill_orphans(ORPHANS_S)
        self._closer.drain_closing(OUTPUT_PATIENCE_S)
        if isinstance(self._logs, GenerationLogs):
            self._logs.close()
        sweep_heartbeat_files()
        if self._claim is not None:
            self._claim.release()
        self._release_node_id()
        self._event_log.close()
