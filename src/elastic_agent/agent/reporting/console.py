"""The console reporter: messages about events, and what the agent is waiting for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from elastic_agent.agent import events
from elastic_agent.agent.tasks import BackgroundTasks
from elastic_agent.diagnosis.known_errors import ending
from elastic_agent.logs import WaitingReporter, bind_context, get_logger
from elastic_agent.monitoring.run_log import symptom
from elastic_agent.monitoring.status import join_causes
from elastic_agent.protocol import (
    PROGRESS_S,
    UNSTABLE,
    Failure,
    Growth,
    Phase,
    Plan,
    Seat,
    Waiting,
    World,
    count,
    end_reason,
    names,
)
from elastic_agent.rendezvous.events import (
    Connected,
    Disconnected,
    LeaseLost,
    PlanSeen,
    Registered,
    Renewed,
)
from elastic_agent.transport import Obstacle
from elastic_agent.workers.guard.client import Spawned

SHOWN_HOLDERS = 8
PATIENCE_S = 2.0
"""Shorter waits are not reported."""

WORKERS_PATIENCE_S = 5.0
"""The same of waits for workers, which may take a while to start, to save or to end."""

_LASTING = (
    Obstacle.NO_ANSWER,
    Obstacle.UNREACHABLE,
    Obstacle.SILENT,
    Obstacle.UNKNOWN_NAME,
    Obstacle.OWN_NETWORK,
)
"""Obstacles that have lasted for long when they are noticed, or are not expected to pass by themselves."""


@dataclass(eq=False, repr=False)
class ConsoleReporter:
    """Log lines for what happened, sparse ones for what is awaited."""

    endpoint: Callable[[], str]
    """Gives it as the user wrote it, with the port once that is known."""
    read_status: Callable[[], Awaitable[Waiting]] | None = None
    """Reads what the coordinator is waiting for, as soon as that is possible."""
    how_to_reach: Callable[[Obstacle, bool, Sequence[Seat]], str] = lambda *_: ""
    """Gives what to do about a store that does not answer, from the obstacle, whether it had answered, and the nodes of
    the last world."""
    are_warm: bool = False
    """Workers are forked from a process that imports torch first."""

    def __post_init__(self) -> None:
        self.newest_step: Callable[[], int] = lambda: 0
        """Gives the newest step that a worker reported; 0: none has."""
        self.node_id = self._incarnation = ""
        """Of this node: its id, when it is known, and its incarnation in the plans that are shown."""
        self._log = get_logger()
        self._reporter = WaitingReporter(self._log.info)
        # The wait.
        self._text = self._causes = ""
        self._patience_s = PATIENCE_S
        self._awaits_status = False
        self._told: set[str] = set()
        """The lines logged since the wait began: an obstacle may change and come back."""
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = BackgroundTasks()
        self._asking: asyncio.Task[None] | None = None
        # The store.
        self.last_problem = ""
        """Why it did not answer when it was dialled last; empty: it answers."""
        self._obstacle = Obstacle.OTHER
        self._dialling = self._was_connected = False
        """It does not answer, or has not taken a record since it was lost; and whether it answered at least once."""
        self._lost_at, self._is_loss_told = "", True
        """When the connection was lost last, as a time of the day, and whether that was logged."""
        self._has_ended_lease = False
        """The lease of this node ran out because it did not answer."""
        # The run.
        self._world = self._notice = ""
        """The world that runs with this node, or the run's end; and the notice to the workers, while they may save."""
        self._are_starting = self._leaves = self._has_run = False
        """The workers of this node were to be started, and are not known to run; it is to leave; a node that is missing
        was there before: it left, or failed."""
        self._seats: Sequence[Seat] = ()  # of the last world
        self._lost: dict[str, str] = {}
        """By node id, in words: the nodes of the last world that were lost, with the time."""
        self._shown_plan: tuple[Phase, int, str] | None = None
        self._announced: tuple[int, str] | None = None
        """The generation, and the incarnation in it, that was announced last."""

    @property
    def remedy(self) -> str:
        """Advice for a store that does not answer; empty: the reason contains it, or the store answers."""
        if not self.last_problem:
            return ""
        return self.how_to_reach(self._obstacle, self._was_connected, self._seats)

    def headline(self) -> str:
        """Return the status in one line."""
        step = self.newest_step()
        world = f"{self._world}, step {step}" if self._world and step else self._world
        is_told = self._dialling or not (self._are_starting or self._notice)
        waits = self._text if self._timer is not None and is_told else ""
        return "; ".join(filter(None, (world, self._notice, waits))) or (
            "joining the run" if self._was_connected else f"connecting to {self.endpoint()}"
        )

    def on_event(self, event: events.Event) -> None:
        """Show events that change what the agent waits for, or the status of the run."""
        self._store_event(event)
        if isinstance(event, events.Rejoining) and not self._has_ended_lease:
            self._log.info(
                "rejoining under a new incarnation", reason=event.reason, incarnation=event.incarnation
            )
        match event:
            case events.AgentStarted(incarnation=incarnation) | events.Rejoining(incarnation=incarnation):
                self._incarnation = incarnation
            case PlanSeen(plan=plan):
                self._plan(plan)
            case events.Hosting(runs=runs, nodes=nodes) if runs:
                self._hosting(runs, nodes)
            case events.WorkersFailed(failure=failure):
                self._log.error(self._failed(failure), kind=failure.kind.value)
                self._have_started()
            case events.DrainRequested(node=None):
                self._leaves = True
            case Spawned():
                self._have_started()

    def _failed(self, failure: Failure) -> str:
        """Return which worker failed, without its error if it raised one: the report on the root cause shows it."""
        if failure.slot is None or failure.returncode is None or not failure.error:
            return failure.summary
        return f"worker {self.node_id}/{failure.slot} {ending(failure.returncode)}"

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
            case Disconnected(reason=reason, obstacle=obstacle):
                self._disconnected(reason, obstacle)
            case LeaseLost():
                self._lease_lost(event)

    def _connected(self, replaced: bool) -> None:
        if replaced:
            self._log.warning(
                "the store was restarted empty; resuming the run from the state saved on the nodes"
            )
        elif self._dialling and (self._is_loss_told or not self._was_connected):
            again = " again" if self._was_connected else ""
            self._log.info(f"the store at {self.endpoint()} answers{again}")
        self._dialling, self._was_connected, self.last_problem = False, True, ""
        self._rest()
        if self._shown_plan is not None and self._shown_plan[0] is Phase.FORMING:
            self._await_status(f"forming generation {self._shown_plan[1]}")

    def _disconnected(self, reason: str, obstacle: Obstacle) -> None:
        self.last_problem, self._obstacle = reason, obstacle
        text = f"waiting for the store at {self.endpoint()}: {reason}"
        if self._dialling:
            self._text = text
            return
        self._dialling = True
        if self._was_connected:
            self._lost_at, self._is_loss_told = time.strftime("%H:%M:%S"), False
        self._await(text, 0.0 if obstacle in _LASTING else PATIENCE_S)

    def _lease_lost(self, lost: LeaseLost) -> None:
        """Log it; if the store does not answer, with the causes of that and what to do."""
        causes = self._store_causes() if lost.unanswered and self._dialling else ""
        self._has_ended_lease = bool(causes)
        if not causes:
            self._log.warning(
                "this node lost its lease; stopping its workers immediately", reason=lost.reason
            )
        elif self._world:
            is_told = causes in self._told
            self._told.add(causes)
            since = f"the store has not answered since {self._lost_at}, as told above"
            self._log.warning(f"training is paused: {since if is_told else causes}")
        self._world = self._notice = ""

    def _store_causes(self) -> str:
        """Return what to do about a store that does not answer, unless the reason contains it."""
        remedy = self.remedy
        since = f"the store has not answered since {self._lost_at}: " if self._was_connected else ""
        return since + remedy if remedy else ""

    def _tell_loss(self) -> None:
        """Log that the store was lost once that has lasted: a connection may break again and again."""
        if not self._is_loss_told:
            self._is_loss_told = True
            self._log.warning(
                f"lost the connection to the store at {self.endpoint()}; workers go on without it for a while "
                "(--lease-ttl)",
                reason=self.last_problem,
            )

    # -- the run --------------------------------------------------------------------------------

    def _plan(self, plan: Plan) -> None:
        bind_context(generation=plan.generation)
        shown_plan = plan.phase, plan.generation, plan.reason
        # Other plans differ in details that do not matter here.
        is_changed, self._shown_plan = shown_plan != self._shown_plan, shown_plan
        self._world = self._notice = ""
        self._are_starting &= plan.phase is Phase.RUNNING
        if plan.phase is Phase.FORMING:
            self._forming(plan, is_changed)
        elif plan.phase is Phase.RUNNING and plan.world is not None:
            self._rest()
            self._running(plan, plan.world, is_changed)
        else:
            self._rest()
            log = self._log.error if plan.phase is Phase.FAILED else self._log.info
            verb = "was stopped" if plan.phase is Phase.STOPPED else plan.phase.value
            self._world = f"the run {verb}: {plan.reason}"
            if is_changed:
                log(self._world)  # the report on the root cause shows the end of the output
            self._await_status("", WORKERS_PATIENCE_S)

    def _forming(self, plan: Plan, is_changed: bool) -> None:
        ends = plan.failure is not None and bool(end_reason(plan, plan.failure.words))
        if is_changed and not ends and not self._leaves and self._incarnation not in plan.leaving:
            # An error is left to the report on the root cause: it may follow from another worker's failure.
            is_symptom = bool(plan.lost) or (plan.failure is not None and bool(plan.failure.error))
            reason = (symptom(plan) if is_symptom else "") or plan.reason
            self._log.info(f"forming generation {plan.generation}: {reason}")
        self._has_run = plan.world is not None
        if is_changed and plan.world is not None:
            now = time.strftime("%H:%M:%S")
            self._lost = {
                seat.node_id: f"{seat.node_id} ({seat.address}), lost at {now}"
                for seat in plan.world.seats
                if seat.node_id in plan.lost
            }
        self._await_status(f"forming generation {plan.generation}")

    def _running(self, plan: Plan, world: World, is_changed: bool) -> None:
        self._seats = world.seats
        seat = world.seat_of(self._incarnation)
        if seat is None:
            self._wait_outside(plan, world)
            return
        self._world = (
            f"generation {plan.generation}: {count(len(world.seats), 'node')}, "
            f"{count(world.world_size, 'worker')}"
        )
        if plan.notice is not None:
            self._notice = f"{plan.notice.words}: workers may save and exit"
            self._await_status("", WORKERS_PATIENCE_S)
        elif self._are_starting:
            self._await_start()
        # The world is the same, only the plan is newer.
        if self._announced == (plan.generation, self._incarnation):
            if plan.notice is None and is_changed:  # the notice is shown instead
                self._log.info(f"generation {plan.generation} continues: {plan.reason}")
            return
        self._announced = plan.generation, self._incarnation
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

    def _wait_outside(self, plan: Plan, world: World) -> None:
        """Wait for a place in a world that runs without this node."""
        is_full = len(world.seats) >= plan.policy.max_nodes
        others = f"{count(len(world.seats), 'node')} (maximum {plan.policy.max_nodes})"
        self._causes = _standby_causes(world) if is_full else _delay_causes(plan, self.node_id)
        self._await(
            f"on standby: generation {plan.generation} runs with {others}"
            if is_full
            else f"waiting to join: generation {plan.generation} runs with {others}"
        )

    def _hosting(self, runs: Sequence[str], nodes: Sequence[str]) -> None:
        self._causes = (
            f"if this agent or its machine is stopped, {names(nodes)} cannot go on until the same command is started "
            "here again"
            if nodes
            else ""
        )
        self._await(
            f"local workers are done; keeping the rendezvous store up for run {', '.join(runs)} until it ends"
        )

    # -- waiting --------------------------------------------------------------------------------

    def _await_start(self) -> None:
        self._are_starting = True
        why = ": the process they are forked from still imports torch, or what the script imports"
        text = f"waiting for the workers of this node to start{why if self.are_warm else ''}"
        self._await(text, WORKERS_PATIENCE_S)

    def _have_started(self) -> None:
        """End the wait for the workers' start, unless another one has taken its place."""
        if self._are_starting and not (self._dialling or self._notice):
            self._rest()
        self._are_starting = False

    def _await_status(self, text: str, after_s: float | None = None) -> None:
        """Report what the run waits for, such as workers that save and exit; until that is known, ``text``."""
        self._await(text, after_s)
        self._awaits_status = True

    def _await(self, text: str, after_s: float | None = None) -> None:
        """Report the wait once it has lasted long enough to matter."""
        self._text, self._awaits_status = text, False
        self._patience_s = PATIENCE_S if after_s is None else after_s
        self._stop_timer()
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
            self._text = waiting.reason
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
        """Log the wait if that is due; its common causes are logged once."""
        if self._dialling:
            self._tell_loss()
            self._causes = self._store_causes()
        if self._text:
            topic = self._text if self._awaits_status else ""
            self._reporter.update(self._text, topic, already_s=self._patience_s or PATIENCE_S)
        if self._causes and self._causes not in self._told:
            self._told.add(self._causes)
            self._log.info(self._causes)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _rest(self) -> None:
        self._awaits_status = False
        self._causes = ""
        self._told.clear()
        self._stop_timer()
        self._reporter.clear()

    def close(self) -> None:
        """Stop waiting, and give up what is under way."""
        self._rest()
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
        what = "did not start its workers in time" if failed_starts >= UNSTABLE else "was lost"
        return (
            f"this node {what} {losses} times in a row: it is admitted when the other nodes have trained for "
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
