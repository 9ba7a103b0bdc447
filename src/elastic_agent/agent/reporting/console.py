"""The console reporter: messages about events, and a status line for what the agent is waiting for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from elastic_agent.agent import events
from elastic_agent.agent.tasks import BackgroundTasks
from elastic_agent.logs import bind_context, get_logger, is_console, waiting_reporter
from elastic_agent.monitoring.run_log import broken_connection, symptom
from elastic_agent.monitoring.status import join_causes
from elastic_agent.protocol import (
    PROGRESS_S,
    UNSTABLE,
    Depart,
    Growth,
    Phase,
    Plan,
    Seat,
    Waiting,
    World,
    count,
    names,
)
from elastic_agent.rendezvous.events import (
    Connected,
    Disconnected,
    LeaseLost,
    PlanSeen,
    Registered,
    Renewed,
    Unusable,
)
from elastic_agent.transport import Obstacle
from elastic_agent.workers.guard.client import Spawned

from .store_problem import StoreProblem

SHOWN_HOLDERS = 8
PATIENCE_S = 2.0
"""Shorter waits are not reported."""

WORKERS_PATIENCE_S = 5.0
"""The same of waits for workers, which may take a while to start, to save or to end."""


class _HeldLine:
    """A line about a generation that forms after a failure, which may also turn out to have ended the run."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._text = ""
        self._timer: asyncio.TimerHandle | None = None

    def hold(self, text: str, for_s: float) -> None:
        """Log this line after so long, unless it is dropped before."""
        self._text = text
        if for_s > 0:
            self._timer = asyncio.get_running_loop().call_later(for_s, self.release)
        else:
            self.release()

    def release(self) -> None:
        """Log the line now, if there is one."""
        text = self._text
        self.drop()
        if text:
            self._log(text)

    def drop(self) -> None:
        """Do not log the line."""
        self._text = ""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ConsoleReporter:
    """Log lines for what happened, one live line (or sparse log lines) for what is awaited."""

    _brief_text = ""
    """Why the store is awaited, without what to do about it: for the live line, above which that is told."""
    _patience_s = PATIENCE_S
    """For how long it was awaited before that is reported."""
    _are_starting = False
    """The workers of this node were to be started, and are not known to run."""

    def __init__(
        self,
        endpoint: Callable[[], str],
        read_status: Callable[[], Awaitable[Waiting]] | None = None,
        how_to_reach: Callable[[Obstacle, bool, Sequence[Seat]], str] = lambda *_: "",
        are_warm: bool = False,
    ) -> None:
        """Prepare; nothing is shown yet.

        Args:
            endpoint: gives it as the user wrote it, with the port once that is known.
            read_status: reads what the coordinator is waiting for, as soon as that is possible.
            how_to_reach: gives what to do about a store that does not answer, from the obstacle, whether it had
                answered, and the nodes of the last world.
            are_warm: workers are forked from a process that imports torch first.
        """
        self._endpoint = endpoint
        self._how_to_reach = how_to_reach
        self._are_warm = are_warm
        self.read_status = read_status
        self.newest_step: Callable[[], int] = lambda: 0
        """Gives the newest step that a worker reported; 0: none has."""
        self._log = get_logger()
        self._reporter = waiting_reporter()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = BackgroundTasks()
        self._asking: asyncio.Task[None] | None = None
        self._awaits_status = False
        self._has_run = False
        """A node that is missing was there before: it left, or failed."""
        self._dialling = False
        """The store does not answer, or has not taken a record since it was lost."""
        self._was_connected = False
        """The store answered at least once."""
        self._text = self._causes = ""
        self._told_causes: set[str] = set()
        """Since the wait began: what is in the way may change and come back."""
        self._seats: Sequence[Seat] = ()  # of the last world
        self._lost: dict[str, str] = {}
        """By node id, in words: the nodes of the last world that were lost, with the time."""
        self._facts: dict[str, object] = {}
        self._problem = StoreProblem()
        self.node_id = ""
        """Of this node, when it is known."""
        self._incarnation = ""
        """Of this node, in the plans that are shown."""
        self._shown_plan: tuple[Phase, int, str] | None = None
        self._announced: tuple[int, str] | None = None
        """The generation, and the incarnation in it, that was announced last."""
        self._world = self._notice = ""
        """What runs with this node, or how the run ended; and the notice to the workers, while they may save."""
        self._leaves = False
        """This node is to leave: no generation forms here."""
        self._held = _HeldLine(self._log.info)

    @property
    def last_problem(self) -> str:
        """Why the store did not answer when it was dialled last."""
        return self._problem.reason

    @property
    def remedy(self) -> str:
        """What to do about a store that does not answer; empty: the reason contains it, or the store answers."""
        reason, obstacle = self._problem.reason, self._problem.obstacle
        return self._how_to_reach(obstacle, self._was_connected, self._seats) if reason else ""

    def headline(self) -> str:
        """Return the status in one line."""
        step = self.newest_step()
        world = f"{self._world}, step {step}" if self._world and step else self._world
        is_told = self._dialling or not (self._are_starting or self._notice)
        waits = self._text if self._timer is not None and is_told else ""
        return "; ".join(filter(None, (world, self._notice, waits))) or (
            "joining the run" if self._was_connected else f"connecting to {self._endpoint()}"
        )

    def on_event(self, event: events.Event) -> None:
        """Show events that change what the agent waits for, or the status of the run."""
        self._store_event(event)
        if isinstance(event, events.Rejoining) and not self._problem.has_ended_lease:
            self._log.info(
                "rejoining under a new incarnation", reason=event.reason, incarnation=event.incarnation
            )
        match event:
            case events.AgentStarted(incarnation=incarnation) | events.Rejoining(incarnation=incarnation):
                self._incarnation = incarnation
            case PlanSeen(plan=plan):
                self._plan(plan)
            case LeaseLost():
                self._lease_lost(event)
            case events.Hosting(runs=runs, nodes=nodes) if runs:
                self._hosting(runs, nodes)
            case events.WorkersFailed(failure=failure):
                # People read it where the worker wrote it, or with the root cause.
                tail = {"tail": failure.tail} if failure.tail and not is_console() else {}
                self._log.error(failure.summary, kind=failure.kind.value, **tail)
                self._have_started()
            case events.DrainRequested(node=None):
                self._leaves = True
            case Depart():
                self._held.drop()
            case Spawned():
                self._have_started()
            case events.WorkersCleared() | events.WorkersSaved() | events.WorkersSucceeded():
                self._reporter.share(False)

    # -- the store ------------------------------------------------------------------------------

    def _store_event(self, event: events.Event) -> None:
        match event:
            case events.RunAgreed():
                self._connected(False)
            case Connected(replaced=replaced) if replaced or not self._was_connected:
                self._connected(replaced)
            case Registered() | Renewed() | PlanSeen() if self._dialling:
                # Not before: a store that is full answers, but takes no records.
                self._connected(False)
            case Disconnected(reason=reason, obstacle=obstacle, problem=problem):
                self._disconnected(reason, obstacle, problem)
            case Unusable(reason=reason):
                self._disconnected(reason, Obstacle.EXPLAINED)

    def _connected(self, replaced: bool) -> None:
        if replaced:
            self._log.warning(
                "the store was restarted empty; resuming the run from the state saved on the nodes"
            )
        elif self._dialling and (self._problem.is_loss_told or not self._was_connected):
            again = " again" if self._was_connected else ""
            self._log.info(f"the store at {self._endpoint()} answers{again}")
        self._dialling, self._was_connected = False, True
        self._problem.over()
        self._rest()
        if self._shown_plan is not None and self._shown_plan[0] is Phase.FORMING:
            self._text, self._facts = f"forming generation {self._shown_plan[1]}", {}
            self._await_soon(True)

    def _disconnected(self, reason: str, obstacle: Obstacle, problem: str = "") -> None:
        self._problem.seen(reason, obstacle, asyncio.get_running_loop().time())
        if not self._dialling:
            self._dialling = True
            self._await_soon(False, 0.0 if self._problem.is_urgent else PATIENCE_S)
            if self._was_connected:
                self._problem.lost()
        self._text = f"waiting for the store at {self._endpoint()}: {reason}"
        self._brief_text = f"waiting for the store at {self._endpoint()}: {problem or reason}"
        self._facts = {"endpoint": self._endpoint()}

    def _tell_loss(self) -> None:
        """Log it, once it has lasted long enough to matter: a connection may break again and again."""
        if not self._problem.is_loss_told:
            self._problem.is_loss_told = True
            self._log.warning(
                f"lost the connection to the store at {self._endpoint()}; workers go on without it for a while "
                "(--lease-ttl)",
                reason=self._problem.reason,
            )

    def _lease_lost(self, lost: LeaseLost) -> None:
        """Log it; if the store does not answer, with the causes of that and what to do."""
        causes = self._store_causes() if lost.unanswered and self._dialling else ""
        self._problem.has_ended_lease = bool(causes)
        if not causes:
            self._log.warning(
                "this node lost its lease; stopping its workers immediately", reason=lost.reason
            )
        elif self._world:
            is_told = causes in self._told_causes
            self._told_causes.add(causes)
            since = f"the store has not answered since {self._problem.lost_at}, as told above"
            self._log.warning(f"training is paused: {since if is_told else causes}")
        self._world = self._notice = ""

    def _store_causes(self) -> str:
        """Return what to do about a store that does not answer, unless the reason contains it."""
        remedy = self.remedy
        since = f"the store has not answered since {self._problem.lost_at}: " if self._was_connected else ""
        return since + remedy if remedy else ""

    def _tell_problem(self) -> None:
        """Log why the store does not answer: a live line has no room for all of it, and does not stay."""
        if self._reporter.is_live and self._dialling:
            reason = self._problem.due(asyncio.get_running_loop().time())
            if reason:
                self._log.warning(f"the store at {self._endpoint()} does not answer: {reason}")

    # -- the run --------------------------------------------------------------------------------

    def _plan(self, plan: Plan) -> None:
        bind_context(generation=plan.generation)
        shown_plan = plan.phase, plan.generation, plan.reason
        # Other plans differ in details that do not matter here.
        is_changed, self._shown_plan = shown_plan != self._shown_plan, shown_plan
        self._world = self._notice = ""
        self._are_starting &= plan.phase is Phase.RUNNING
        if plan.phase is Phase.FORMING:
            if is_changed and not self._leaves and self._incarnation not in plan.leaving:
                self._forming(plan)
            self._text, self._facts = f"forming generation {plan.generation}", {}
            self._has_run = plan.world is not None
            if is_changed and plan.world is not None:
                lost = [seat for seat in plan.world.seats if seat.node_id in plan.lost]
                now = time.strftime("%H:%M:%S")
                self._lost = {
                    seat.node_id: f"{seat.node_id} ({seat.address}), lost at {now}" for seat in lost
                }
            self._await_soon(True)
        elif plan.phase is Phase.RUNNING and plan.world is not None:
            self._rest()
            self._held.release()
            self._running(plan, plan.world, is_changed)
        else:
            self._rest()
            self._held.drop()
            log = self._log.error if plan.phase is Phase.FAILED else self._log.info
            verb = "was stopped" if plan.phase is Phase.STOPPED else plan.phase.value
            self._world = f"the run {verb}: {plan.reason}"
            if is_changed:
                log(self._world)  # the report on the root cause shows the end of the output
            self._await_workers()

    def _forming(self, plan: Plan) -> None:
        """Log it now, or after a failure when it is likely that the run continues."""
        self._held.release()
        # With a lost node, or a broken connection, the failure may be a consequence of another one.
        reason = (symptom(plan) if plan.lost else broken_connection(plan)) or plan.reason
        for_s = 0.0 if plan.failure is None else PATIENCE_S
        self._held.hold(f"forming generation {plan.generation}: {reason}", for_s)

    def _running(self, plan: Plan, world: World, is_changed: bool) -> None:
        self._seats = world.seats
        seat = world.seat_of(self._incarnation)
        if seat is None:
            is_full = len(world.seats) >= plan.policy.max_nodes
            others = f"{count(len(world.seats), 'node')} (maximum {plan.policy.max_nodes})"
            self._text = (
                f"on standby: generation {plan.generation} runs with {others}"
                if is_full
                else f"waiting to join: generation {plan.generation} runs with {others}"
            )
            self._facts = {"nodes": len(world.seats)}
            self._causes = _standby_causes(world) if is_full else _delay_causes(plan, self.node_id)
            self._await_soon(False)
            return
        self._world = (
            f"generation {plan.generation}: {count(len(world.seats), 'node')}, "
            f"{count(world.world_size, 'worker')}"
        )
        if plan.notice is not None:
            self._notice = f"{plan.notice.words}: workers may save and exit"
            self._await_workers()
        elif self._are_starting:
            self._await_start()
        # The world is the same, only the plan is newer.
        if self._announced == (plan.generation, self._incarnation):
            if plan.notice is None and is_changed:  # the notice is shown instead
                self._log.info(f"generation {plan.generation} continues: {plan.reason}")
            return
        self._announced = plan.generation, self._incarnation
        self._reporter.share(True)
        if plan.notice is None:
            self._await_start()
        last = seat.first_rank + seat.slots - 1
        ranks = f"rank {last}" if seat.slots == 1 else f"ranks {seat.first_rank}-{last}"
        self._log.info(
            f"{self._world}; {ranks} here",
            nodes=len(world.seats),
            world_size=world.world_size,
            node_rank=world.node_rank(self._incarnation),
            restarts=plan.charged,
        )

    def _hosting(self, runs: Sequence[str], nodes: Sequence[str]) -> None:
        self._text = (
            f"local workers are done; keeping the rendezvous store up for run {', '.join(runs)} until it ends"
        )
        self._causes = (
            f"if this agent or its machine is stopped, {names(nodes)} cannot go on until the same command is started "
            "here again"
            if nodes
            else ""
        )
        self._facts = {"runs": len(runs)}
        self._await_soon(False)

    # -- waiting --------------------------------------------------------------------------------

    def _await_start(self) -> None:
        self._are_starting, self._facts = True, {}
        self._text = "waiting for the workers of this node to start"
        if self._are_warm:
            self._text += ": the process they are forked from still imports torch, or what the script imports"
        self._await_soon(False, WORKERS_PATIENCE_S)

    def _have_started(self) -> None:
        """End the wait for the workers' start, unless another one has taken its place."""
        if self._are_starting and not (self._dialling or self._notice):
            self._rest()
        self._are_starting = False

    def _await_workers(self) -> None:
        """Report whose workers the run waits for to save and exit; until that is known, nothing."""
        self._text, self._facts = "", {}
        self._await_soon(True, WORKERS_PATIENCE_S)

    def _await_soon(self, status: bool, after_s: float | None = None) -> None:
        """Report the wait once it has lasted long enough to matter."""
        self._awaits_status = status
        self._stop_timer()
        self._patience_s = PATIENCE_S if after_s is None else after_s
        self._timer = asyncio.get_running_loop().call_later(self._patience_s, self._tick)

    def _tick(self) -> None:
        if not self._awaits_status:
            self._report()
        elif self._asking is None or self._asking.done():
            self._asking = self._tasks.start(self._fetch_status())
        self._timer = asyncio.get_running_loop().call_later(1.0, self._tick)

    async def _fetch_status(self) -> None:
        waiting = await self.read_status() if self.read_status is not None else Waiting()
        if not self._awaits_status:
            return
        if waiting.reason:
            self._text, self._facts = waiting.reason, {"awaited": waiting.reason}
            self._causes = self._lost_causes(waiting) if self._has_run else join_causes(waiting)
        self._report()

    def _lost_causes(self, waiting: Waiting) -> str:
        """Return what to do about nodes that were lost and that the run waits for; empty if there are none."""
        missing = [
            description for node_id, description in self._lost.items() if node_id not in waiting.joined
        ]
        if not (missing and waiting.lacks_nodes):
            return ""
        return (
            f"waiting for {', '.join(missing)}: start the same command there again; or go on with fewer nodes: start "
            "all agents again with a smaller --nnodes"
        )

    def _report(self) -> None:
        """Show the wait; its common causes are logged once, in a line that stays."""
        if self._dialling:
            self._tell_loss()
            self._causes = self._store_causes()
        brief = self._dialling and self._reporter.is_live
        if text := self._brief_text if brief else self._text:
            self._reporter.update(text, self._facts, already_s=self._patience_s or PATIENCE_S)
        self._tell_problem()
        if self._awaits_status and self._reporter.is_cut and self._text not in self._told_causes:
            self._told_causes.add(self._text)
            self._log.info(self._text)
        if self._causes and self._causes not in self._told_causes:
            self._told_causes.add(self._causes)
            self._log.info(self._causes)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _rest(self) -> None:
        self._awaits_status = False
        self._causes = ""
        self._told_causes.clear()
        self._stop_timer()
        self._reporter.clear()

    def close(self) -> None:
        """Stop waiting, and give up what is under way."""
        self._rest()
        self._held.drop()
        self._tasks.cancel()


def _standby_causes(world: World) -> str:
    holders = [f"{seat.node_id} ({seat.address})" for seat in world.seats]
    if len(holders) > SHOWN_HOLDERS:
        holders[SHOWN_HOLDERS:] = [f"{len(holders) - SHOWN_HOLDERS} more"]
    return (
        f"the run has all its nodes: {', '.join(holders)}; this node replaces one that fails or leaves. If the agent "
        "of one of them is left from an earlier start, remove it with elastic-agent drain NODE; to run on more nodes, "
        "start all agents with a larger --nnodes"
    )


def _delay_causes(plan: Plan, node_id: str) -> str:
    losses, failed_starts = plan.losses.get(node_id, 0), plan.start_failures.get(node_id, 0)
    if losses >= UNSTABLE:
        return (
            f"this node was lost {losses} times in a row: it is admitted when the other nodes have trained for "
            f"{PROGRESS_S:g} s, so that an unstable machine does not interrupt them again and again; see on this "
            "machine what ended or paused its agent (journalctl, dmesg), or disturbed its network"
        )
    if failed_starts >= UNSTABLE:
        return (
            f"the workers of this node could not be started {failed_starts} times in a row: it is admitted when the "
            "next generation forms with too few nodes; see the errors above"
        )
    if plan.policy.grow is not Growth.AFTER and node_id not in plan.order:
        notices = " or the script handles a notice" * (plan.policy.grow is Growth.AT_NOTICE)
        return f"a new node joins when the next generation forms{notices} (--grow {plan.policy.grow.value})"
    return ""
