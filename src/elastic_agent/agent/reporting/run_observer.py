"""Observes the run for its users: keeps its history, explains failures, and answers what its status is.

What it does explains the run and decides nothing: if the store or the disk does not answer, the status is less
complete, and nothing else changes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from elastic_agent.agent import events
from elastic_agent.agent.control.socket import Question
from elastic_agent.agent.supervisor import Supervisor
from elastic_agent.agent.tasks import BackgroundTasks
from elastic_agent.agent.worker_group.collectives import Collectives
from elastic_agent.agent.worker_group.connection_watch import ConnectionWatch
from elastic_agent.agent.worker_group.stalls import Progress
from elastic_agent.diagnosis.cause import RootCause
from elastic_agent.diagnosis.render import render
from elastic_agent.diagnosis.root_cause import root_cause
from elastic_agent.logs import get_logger, is_console
from elastic_agent.monitoring.run_log import RunLog
from elastic_agent.monitoring.status import RunStatus, run_status
from elastic_agent.printable import plain
from elastic_agent.protocol import Outcome, Phase, Plan, waiting_in
from elastic_agent.rendezvous.backends import RendezvousBackend
from elastic_agent.rendezvous.events import Connected, PlanSeen
from elastic_agent.rendezvous.reports import Reports, RunReports
from elastic_agent.transport import TransportError
from elastic_agent.values import Endpoint
from elastic_agent.web.plots import History
from elastic_agent.web.server import Runs, StatusServer, open_status_page
from elastic_agent.workers.guard.client import Spawned

from .goodput_recorder import GoodputRecorder
from .hang_judge import HangJudge
from .node_comparison import NodeComparison
from .node_reports import REPORT_EVERY_S, NodeReports
from .questions import Questions
from .status_files import StatusFiles
from .store_problem import Outage

GATHER_S = 10.0
"""How long the reports on a failed generation are waited for; not for those of nodes that are lost."""

ANSWER_S = 2.0
"""How long the store may take, when a user asks for the status, until the answer is what was known before."""

EXPLAINED_S = 11.0
"""How long the explanation may take when the run has failed."""

READ_S = 3.0
"""How long the store of a run that has failed stays for nodes that have not read the reports of the others yet."""

OUTPUT_LINES = 50
"""So many of each file of a worker are shown on the page."""

SAVED_S = 1.0
"""How long writing the last status may take otherwise: there is nothing to explain."""

SAVE_AFTER_S = 1.0
"""How long after the begin of a generation it is recorded: its workers are being started."""


class _ShownOutput:
    """What users have seen of the output of this node's workers before their end is explained."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._seen: set[tuple[int, str]] = set()
        """By generation: workers that print beside the log; for programs, the one whose failure was logged with its
        output."""

    def take_in(self, event: events.Event) -> None:
        """Update it from an event."""
        match event:
            case events.WorkersFailed(generation=generation, failure=failure) if (
                failure.tail and not is_console()
            ):
                self._seen = {(generation, f"{self._node_id}/{failure.slot}")}
            case events.GenerationEnded(generation=generation, workers=workers) if is_console():
                shown = [end.report.slot for end in workers if end.is_shown]
                self._seen = {(generation, f"{self._node_id}/{slot}") for slot in shown}

    def rendered(self, generation: int, cause: RootCause) -> str:
        """Return the report on a root cause, without output that has been seen."""
        is_seen = (generation, cause.tail_of or cause.worker) in self._seen
        return render(replace(cause, tail="") if is_seen else cause)


class RunObserver:
    """One node's view of the run, from the start of the agent's part in it to the end."""

    def __init__(
        self,
        run_id: str,
        node_id: str,
        backend: RendezvousBackend,
        supervisor: Supervisor,
        collectives: Collectives,
        publisher: events.Publisher,
        state_dir: Path,
        *,
        goes_on: bool,
        facts: Mapping[str, str],
        log_dir: str,
        remedy: Callable[[], str],
    ) -> None:
        """Observe from now on what is published.

        Args:
            run_id, node_id: which run, and which node of it.
            backend: leads to the store.
            supervisor: runs the workers; told when they hang.
            collectives: asks the workers.
            publisher: publishes what is observed.
            state_dir: the status is saved there.
            goes_on: the run has begun before, so that earlier agents may have recorded generations of it.
            facts: how this node was started (:mod:`elastic_agent.diagnosis.differences`).
            log_dir: where the output of the run's workers is on this machine; empty: nowhere.
            remedy: gives what to do about a store that does not answer.
        """
        self._run_id, self._node_id = run_id, node_id
        self._backend = backend
        self._supervisor = supervisor
        self._files = StatusFiles(state_dir, run_id, node_id)
        self._remedy = remedy
        self._log = RunLog(node_id)
        self._tasks = BackgroundTasks()
        self._goodput = GoodputRecorder(lambda: supervisor.progress)
        reports, world = Reports(backend.connect_reports), self._log.world
        self._reports = NodeReports(
            node_id, reports, lambda: supervisor.progress, world, facts, log_dir, self._tasks
        )
        self.questions = Questions(node_id, reports, supervisor, collectives, log_dir)
        self._comparison = NodeComparison(self._log, self._reports, self._tasks)
        self._judge = HangJudge(node_id, self._log, self._reports, supervisor.hang)
        self._watch = ConnectionWatch(node_id, lambda: supervisor.world, self._blocked)
        self._page: StatusServer | None = None
        self._log_dir = log_dir
        self._history = History()
        self._sample_timer: asyncio.TimerHandle | None = None
        self._last_view = RunReports()
        self._repeated = ""
        """What is logged of an earlier explanation at the end, because the reason of the end names a consequence."""
        self._shown = _ShownOutput(node_id)
        self._left, self._serves = "", tuple[str, ...]()
        self._outage = Outage()
        self._is_recalled = not goes_on
        """What earlier agents have recorded is known; before that, it must not be replaced by less."""
        self._save_timer: asyncio.TimerHandle | None = None
        self._publisher = publisher
        publisher.subscribe(self._goodput.on_event, first=True)
        publisher.subscribe(self.on_event)
        publisher.subscribe(self._watch.on_event)

    def open_page(self, address: Endpoint | None) -> None:
        """Serve the status page from now on; None: there is to be none."""
        samples, output = self._history.samples, self._output if self._log_dir else None
        runs = Runs(lambda: (self._run_id,), lambda run_id: self.status(), samples, output)
        self._page = open_status_page(address, runs, self._backend.secret)
        if self._page is not None:
            self._sample()

    def _sample(self) -> None:
        """Note how far this node is, and again after a while."""
        progress = self._supervisor.progress or Progress(0, {}, {})
        is_counted = not any(progress.steps.values())
        at = time.time(), self._goodput.goodput
        self._history.see(*at, progress.generation, progress.newest_step, is_counted=is_counted)
        self._sample_timer = asyncio.get_running_loop().call_later(REPORT_EVERY_S, self._sample)

    async def _output(self) -> str:
        """Return what the workers of this node wrote last; nothing while there are no files, or the disk hangs."""
        answer = await self.questions.answer(Question("logs", lines=OUTPUT_LINES))
        files = [f"==> {worker} <==\n{output}" for worker, output in answer.output.items()]
        return plain("\n".join(files) or answer.text)

    def on_event(self, event: events.Event) -> None:
        """Take note of it."""
        self._outage.take_in(event)
        self._shown.take_in(event)
        match event:
            case Connected(replaced=True):
                # Of a store that is gone, in which versions were counted differently.
                self._last_view = RunReports()
                self._reports.on_new_store()
            case events.AgentStarted(incarnation=incarnation):
                self._reports.incarnation = incarnation
                if not self._is_recalled:
                    self._tasks.start(self._recall())
            case events.Rejoining(incarnation=incarnation):
                self._reports.incarnation = incarnation
            case PlanSeen(plan=plan):
                self._plan_seen(plan)
            case Spawned():
                self._reports.on_progress()
            case events.Stalled():
                self._reports.on_progress()
                self._tasks.start(self._judge.judge(event))
            case events.GenerationEnded():
                self._reports.on_ended(event)

    def _blocked(self, generation: int, line: str) -> None:
        """Report a connection of a worker here that the network blocks."""
        get_logger().warning(line)
        self._reports.on_blocked(generation, line)

    def _plan_seen(self, plan: Plan) -> None:
        change = self._log.see(plan, time.time(), self._reports.incarnation, was_away=self._outage.was_away)
        self._outage.was_away = False
        self._comparison.on_plan()
        if plan.phase is Phase.FAILED and not change.ended:
            self._repeated = self._unnamed_cause(plan)
        for number in change.ended:
            if number in self._log.failures:
                self._tasks.start(self._explain_failure(number, plan))
            else:
                self._save()
        if change.has_begun:
            self._stop_timer()
            self._save_timer = asyncio.get_running_loop().call_later(SAVE_AFTER_S, self._save)

    async def _recall(self) -> None:
        recorded, problems = await self._files.recorded()
        for problem in problems:
            get_logger().warning(problem)
        self._log.recall(recorded)
        self._is_recalled = True

    def _unnamed_cause(self, plan: Plan) -> str:
        """Return the first line on the last generation's root cause, if the run failed for another reason."""
        last = self._log.last
        slot = plan.failure.slot if plan.failure is not None else None
        if last is None or not last.cause or last.culprit == f"{plan.failed_node}/{slot}":
            return ""
        return f"generation {last.generation}: {last.cause.splitlines()[0]}"

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
            log(f"generation {generation}: {self._shown.rendered(generation, cause)}")
        self._reports.confirm(generation)
        self._save()

    # -- the status -----------------------------------------------------------------------------

    async def status(self, within_s: float = ANSWER_S) -> RunStatus:
        """Return the status of the run, from the store if it answers within this time."""
        problem = ""
        self._reports.refresh()
        try:
            self._last_view = await asyncio.wait_for(self._reports.store.read(), within_s)
        except (TransportError, TimeoutError) as error:
            problem = self._outage.reason or str(error) or f"no answer within {within_s:g} s"
        return self._status(problem)

    def _status(self, problem: str = "") -> RunStatus:
        view, seen = self._last_view.view, self._log.plan
        plan = view.plan
        if plan is None or (seen is not None and seen.version > plan.version):
            plan = seen
        is_known = (
            plan is not None
            and seen is not None
            and (plan.phase, plan.generation) == (seen.phase, seen.generation)
        )
        newest = {report.node_id: report for report in (*self._last_view.reports, *self._reports.own)}
        status = run_status(
            run_id=self._run_id,
            endpoint=self._backend.shown,
            asked_s=time.time(),
            plan=plan,
            waiting=waiting_in(view.status),
            members=view.snapshot.members,
            leases=view.snapshot.leases,
            reports=tuple(newest.values()),
            since_s=self._log.since_s if is_known else None,
            generations=self._log.generations,
            departures=self._log.departures,
            goodput=self._goodput.goodput,
            problem=problem,
        )
        silent_since_s = self._outage.since_s if problem else None
        is_silent = silent_since_s is not None
        return replace(
            status,
            node_id=self._node_id,
            left=self._left,
            silent_since_s=silent_since_s,
            is_paused=is_silent and self._takes_part(status) and self._supervisor.progress is None,
            remedy=self._remedy() if is_silent else "",
            serves=self._serves,
        )

    def _takes_part(self, status: RunStatus) -> bool:
        return bool(status.generations) and self._node_id in status.generations[-1].nodes

    # -- the end --------------------------------------------------------------------------------

    async def conclude(
        self, outcome: Outcome, reason: str, *, hosts_readers: bool, serves: Sequence[str]
    ) -> None:
        """Wait until the last failure is explained and the status is saved.

        Args:
            outcome: of this node's part in the run.
            reason: of this outcome.
            hosts_readers: whether other nodes read reports in a store that ends with this agent.
            serves: the nodes that cannot go on without the store of this agent.
        """
        has_failed = outcome is Outcome.FAILED
        why_left = reason if outcome not in (Outcome.FINISHED, Outcome.FAILED, Outcome.STOPPED) else ""
        await self.settle(EXPLAINED_S if has_failed else SAVED_S, why_left, serves)
        if has_failed and hosts_readers:
            await self.others_have_read(READ_S)
        if self._page is not None:
            await self._page.tell_end(self._status())

    async def settle(self, timeout_s: float, why_left: str = "", serves: Sequence[str] = ()) -> None:
        """Wait until the last reports are written and the last failure is explained; not for longer than this.

        ``why_left``: why this node has left the run; empty: it has not. ``serves``: the nodes that need its store.
        """
        self._left, self._serves = why_left, tuple(serves)
        self._comparison.stop()
        self._reports.stop()
        self._stop_timer()
        await self._tasks.settle(timeout_s)
        if self._repeated:
            get_logger().error(self._repeated)
        self._save()
        if self._is_recalled:  # otherwise the disk hangs
            await self._files.written(timeout_s)

    async def others_have_read(self, timeout_s: float) -> None:
        """Wait until all nodes that are not lost have read the reports on the last generation, if that failed."""
        last = self._log.last
        world = self._log.world(last.generation) if last is not None and last.failed else None
        if world is not None:
            await self._reports.gather(world.generation, world, lambda report: report.has_read, timeout_s)

    def close(self) -> None:
        """Observe no more, and give up whatever is under way."""
        for subscriber in (self._goodput.on_event, self.on_event, self._watch.on_event):
            self._publisher.unsubscribe(subscriber)
        self._goodput.close()
        self._watch.stop()
        self._stop_timer()
        if self._sample_timer is not None:
            self._sample_timer.cancel()
        self._tasks.cancel()
        self._reports.close()
        if self._page is not None:
            self._page.close()

    def _save(self) -> None:
        if self._is_recalled:
            self._files.save(self._status())

    def _stop_timer(self) -> None:
        if self._save_timer is not None:
            self._save_timer.cancel()
