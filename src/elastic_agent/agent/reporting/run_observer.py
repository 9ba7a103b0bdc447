"""Observes the run for its users: keeps its history, explains failures, and answers what its status is.

What it does explains the run and decides nothing: if the store or the disk does not answer, the status is less
complete, and nothing else changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import KW_ONLY, dataclass

from msgspec.structs import replace

from elastic_agent.agent import events
from elastic_agent.agent.control.socket import Question
from elastic_agent.agent.local_node import LocalNode
from elastic_agent.agent.supervisor import Supervisor
from elastic_agent.agent.tasks import BackgroundTasks
from elastic_agent.agent.worker_group.collectives import Collectives
from elastic_agent.agent.worker_group.connection_watch import ConnectionWatch
from elastic_agent.diagnosis.cause import render
from elastic_agent.diagnosis.differences import start_facts
from elastic_agent.diagnosis.root_cause import root_cause
from elastic_agent.logs import get_logger, is_console
from elastic_agent.monitoring.run_log import RunLog
from elastic_agent.monitoring.status import RunStatus, run_status
from elastic_agent.monitoring.status_text import goodput_text
from elastic_agent.printable import plain
from elastic_agent.protocol import Outcome, Plan, waiting_in
from elastic_agent.rendezvous.events import Connected, Disconnected, LeaseLost, PlanSeen, Registered, Renewed
from elastic_agent.rendezvous.reports import Reports, RunReports
from elastic_agent.transport import Obstacle, TransportError
from elastic_agent.web.plots import History
from elastic_agent.web.server import ShownRun, StatusServer, open_status_page
from elastic_agent.workers.guard.client import Spawned

from .hang_judge import HangJudge
from .node_comparison import NodeComparison
from .node_reports import NodeReports
from .questions import Questions
from .status_files import StatusFiles
from .training import Training

LOOK_EVERY_S = 5.0
"""The time between reports of the workers' progress, if there was any, and between samples for the page."""

GATHER_S = 10.0
"""The longest wait for the reports on a failed generation, those of lost nodes excepted."""

ANSWER_S = 2.0
"""The time that the store may take when a user asks for the status; then the answer is what was known before."""

EXPLAINED_S = 11.0
"""The time that the explanation may take when the run has failed."""

READ_S = 3.0
"""The time for which the store of a failed run stays for nodes that have not read the reports of the others yet."""

OUTPUT_LINES = 50
"""So many of each file of a worker are shown on the page."""

SAVED_S = 1.0
"""The time that writing the last status may take otherwise: there is nothing to explain."""


@dataclass(eq=False, repr=False)
class RunObserver:
    """One node's view of the run, from the start of the agent's part in it to the end."""

    node: LocalNode
    supervisor: Supervisor
    """Runs the workers; told when they hang."""
    collectives: Collectives
    """Asks the workers."""
    _: KW_ONLY
    goes_on: bool
    """The run has begun before, so that earlier agents may have recorded generations of it."""

    def __post_init__(self) -> None:
        run_id, node_id = self.node.run_id, self.node.node_id
        self._log, self._tasks = RunLog(node_id), BackgroundTasks()
        self._log_dir = self.node.workers.log_dir(run_id)
        store = Reports(self.node.backend.connect_reports)
        facts = start_facts(self.node.settings.script_args, os.environ)
        self._reports = NodeReports(
            node_id, store, self.supervisor, self._log, facts, self._log_dir, self._tasks
        )
        self._files = StatusFiles(self.node.settings.state_dir, run_id, node_id)
        self.questions = Questions(node_id, store, self.supervisor, self.collectives, self._log_dir)
        self.training = Training(self.supervisor)
        self._comparison = NodeComparison(self._reports)
        self._judge = HangJudge(self._reports, self.supervisor.runner.hang)
        watch = ConnectionWatch(node_id, lambda: self.supervisor.world, self._blocked)
        self._stop_watch = watch.stop
        self._subscribers = self.training.on_event, self.on_event, watch.on_event
        for subscriber in self._subscribers:
            self.node.publish.subscribe(subscriber)
        self._page: StatusServer | None = None
        self._history = History()
        self._last_view = RunReports()
        self._shown = 0, frozenset[str]()
        """A generation, and its workers that wrote to the terminal on which the log is read."""
        self._left, self._serves = "", tuple[str, ...]()
        self._silent_since_s: float | None = None
        """Since when the store has not answered, seconds since 1970; None: it answers."""
        self._silent_because, self._was_away = "", False
        """Why; and whether this node has lost its lease and seen no plan since."""
        self._is_recalled = not self.goes_on
        """The records of earlier agents are known; before that, they must not be replaced by less."""
        self._is_unsaved = False
        self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        """Report and keep how far this node is, and again after a while."""
        self._reports.on_progress()
        progress = self.supervisor.progress
        generation, step = (progress.generation, progress.newest_step) if progress is not None else (0, 0)
        is_counted = progress is None or not any(progress.steps.values())
        self._history.see(time.time(), self.training.goodput, generation, step, is_counted=is_counted)
        if self._is_unsaved:
            self._save()
        self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def open_page(self) -> None:
        """Serve the status page from now on, if there is to be one."""
        output = self._output if self._log_dir else None
        run = ShownRun(self.status, self._history.samples, output)
        self._page = open_status_page(self.node.settings.status_port, run, self.node.backend.secret)

    async def _output(self) -> str:
        """Return what the workers of this node wrote last; nothing while there are no files, or the disk hangs."""
        answer = await self.questions.answer(Question("logs", lines=OUTPUT_LINES))
        files = [f"==> {worker} <==\n{output}" for worker, output in answer.output.items()]
        return plain("\n".join(files) or answer.text)

    def on_event(self, event: events.Event) -> None:
        """Take note of it."""
        self._store_event(event)
        match event:
            case events.AgentStarted() if not self._is_recalled:
                self._tasks.start(self._recall())
            case PlanSeen(plan=plan):
                self._plan_seen(plan)
            case Spawned():
                self._reports.on_progress()
            case events.Stalled():
                self._reports.on_progress()
                self._tasks.start(self._judge.judge(event))
            case events.GenerationEnded(generation=generation, shown=slots):
                shown = [f"{self.node.node_id}/{slot}" for slot in slots]
                self._shown = generation, frozenset(shown if is_console() else ())
                self._reports.on_ended(event)

    def _store_event(self, event: events.Event) -> None:
        match event:
            case Connected(replaced=True):
                # Of a store that is gone, in which versions were counted differently.
                self._last_view = RunReports()
                self._reports.on_new_store()
            case Disconnected(reason=reason, obstacle=obstacle):
                self._silent_since_s = self._silent_since_s or time.time()
                if obstacle is Obstacle.OWN_NETWORK or not self._silent_because:
                    self._silent_because = reason  # a cause on this machine is certain, so it is kept
            case LeaseLost():
                self._was_away = True
            case Registered() | Renewed() | PlanSeen():  # a store that is full answers, but takes no records
                self._silent_since_s, self._silent_because = None, ""

    def _blocked(self, generation: int, line: str) -> None:
        """Report a connection of a worker here that the network blocks."""
        get_logger().warning(line)
        self._reports.on_blocked(generation, line)

    def _plan_seen(self, plan: Plan) -> None:
        change = self._log.see(plan, time.time(), self._reports.incarnation, was_away=self._was_away)
        self._was_away = False
        self._comparison.on_plan()
        for number in change.ended:
            if number in self._log.failures:
                self._tasks.start(self._explain_failure(number, plan))
            else:
                self._save()
        self._is_unsaved |= change.has_begun  # not saved at once: its workers are being started

    async def _recall(self) -> None:
        self._log.recall(await self._files.recorded())
        self._is_recalled = True

    async def _explain_failure(self, generation: int, plan: Plan) -> None:
        """Log and keep the root cause, once the nodes of the generation have reported, or are not likely to."""
        world = self._log.world(generation)
        if world is None:
            return
        gathered = await self._reports.gather(generation, world, lambda report: report.is_final, GATHER_S)
        cause = root_cause(gathered.values(), plan, world)
        if cause is not None:
            self._log.explain(generation, cause, self._judge.stacks(generation))
            is_over = self._log.plan is not None and self._log.plan.is_terminal
            log = get_logger().error if is_over else get_logger().warning
            is_shown = self._shown[0] == generation and (cause.tail_of or cause.worker) in self._shown[1]
            log(f"generation {generation}: {render(replace(cause, tail='') if is_shown else cause)}")
        self._reports.confirm(generation)
        self._save()

    # -- the status -----------------------------------------------------------------------------

    async def status(self, within_s: float = ANSWER_S) -> RunStatus:
        """Return the status of the run, from the store if it answers within this time."""
        problem, store = "", dict[str, str]()
        self._reports.on_progress()
        try:
            self._last_view = await asyncio.wait_for(self._reports.store.read(), within_s)
        except (TransportError, TimeoutError) as error:
            problem = self._silent_because or str(error) or f"no answer within {within_s:g} s"
        with contextlib.suppress(TimeoutError):
            store = await asyncio.wait_for(self.node.backend.members(), within_s)
        return replace(self._status(problem), store=store)

    def _status(self, problem: str = "") -> RunStatus:
        view, seen = self._last_view.view, self._log.plan
        plan = view.plan
        if plan is None or (seen is not None and seen.version > plan.version):
            plan = seen
        phase = (plan.phase, plan.generation) if plan is not None else None
        is_known = seen is not None and (seen.phase, seen.generation) == phase
        newest = {report.node_id: report for report in (*self._last_view.reports, *self._reports.own)}
        is_silent = bool(problem) and self._silent_since_s is not None
        generations = self._log.generations
        has_trained = bool(generations) and self.node.node_id in generations[-1].nodes
        known = RunStatus(
            self.node.run_id,
            self.node.backend.shown,
            time.time(),
            since_s=self._log.since_s if is_known else None,
            generations=generations,
            goodput=self.training.goodput,
            problem=problem,
            node_id=self.node.node_id,
            left=self._left,
            silent_since_s=self._silent_since_s if is_silent else None,
            is_paused=is_silent and has_trained and self.supervisor.progress is None,
            remedy=self.node.console.remedy if is_silent else "",
            serves=self._serves,
        )
        return run_status(
            known,
            plan,
            waiting=waiting_in(view.status),
            members=view.snapshot.members,
            leases=view.snapshot.leases,
            reports=tuple(newest.values()),
            departures=self._log.departures,
        )

    # -- the end --------------------------------------------------------------------------------

    async def conclude(self, outcome: Outcome, reason: str) -> None:
        """Wait until the last failure is explained and the status is saved, not for long.

        ``outcome`` and ``reason``: of this node's part in the run.
        """
        has_failed, self._serves = outcome is Outcome.FAILED, tuple(self.node.depending())
        if outcome not in (Outcome.FINISHED, Outcome.FAILED, Outcome.STOPPED):
            self._left = reason
        self._comparison.stop()
        self._timer.cancel()
        # Of a run that failed before the first step, such as with an import, the time of its workers is no training.
        if self.training.has_steps or (self.training.has_run and not has_failed):
            get_logger().info(goodput_text(self.training.goodput))
        patience_s = EXPLAINED_S if has_failed else SAVED_S
        await self._tasks.settle(patience_s)
        self._save()
        if self._is_recalled:  # otherwise the disk hangs
            await self._files.written(patience_s)
        if has_failed and self.node.backend.is_host:
            await self.others_have_read(READ_S)
        if self._page is not None:
            await self._page.tell_end(self._status())

    async def others_have_read(self, timeout_s: float) -> None:
        """Wait until all nodes that are not lost have read the reports on the last generation, if that failed."""
        last = self._log.last
        world = self._log.world(last.generation) if last is not None and last.failed else None
        if world is not None:
            await self._reports.gather(world.generation, world, lambda report: report.has_read, timeout_s)

    def close(self) -> None:
        """Observe no more, and give up whatever is under way."""
        for subscriber in self._subscribers:
            self.node.publish.unsubscribe(subscriber)
        self.training.close()
        self._stop_watch()
        self._timer.cancel()
        self._tasks.cancel()
        self._reports.store.close()
        if self._page is not None:
            self._page.close()

    def _save(self) -> None:
        self._is_unsaved = False
        if self._is_recalled:
            self._files.save(self._status())
