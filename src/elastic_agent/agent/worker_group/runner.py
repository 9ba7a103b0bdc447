"""Runs one generation's workers after the other on this node, through the guard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from elastic_agent.agent import events
from elastic_agent.agent.tasks import BackgroundTasks
from elastic_agent.client._cells import HeartbeatFile
from elastic_agent.config.settings import Settings
from elastic_agent.protocol import Failure, Grace, Notice
from elastic_agent.workers.context import WorkerContext
from elastic_agent.workers.guard import client as guard_events

from .collectives import Collectives
from .generation import Generation, run_generation
from .interruptions import StopSignals
from .parking import Parked, run_apart, take_in_news
from .stalls import Progress
from .warm_start import Guards

_TOO_LATE = "a line in the output of warm ones says what had no effect on preloaded packages"


@dataclass
class Runner:
    """The workers of this node, at most one generation at a time, and the guard that is their parent."""

    guards: Guards
    """The present guard starts and stops the workers."""
    node_id: str
    settings: Settings
    stop_signals: StopSignals
    """The signals that make this agent stop, and which of them it has received."""
    collectives: Collectives
    """The workers' answers about their collectives."""
    sends_notice_signal: bool = True
    """Workers get the notice signal from this agent, and not from Slurm."""
    report: Callable[[events.Event], None] = field(init=False)
    """Takes each event."""
    start_task: Callable[[Coroutine[None, None, None]], asyncio.Task[None]] = field(init=False)
    """Starts a coroutine whose error ends the agent."""
    may_start: bool = True
    """The present guard is on record on the disk; before that it starts no workers."""
    wants_cold: bool = False
    """A worker of an earlier generation was not what a cold one would be; later ones start cold."""
    present: Generation | None = None
    parked: Parked | None = None
    """Workers of the generation before that wait for the next world."""
    explanations: BackgroundTasks = field(default_factory=BackgroundTasks)
    reached_step: int = 0
    reached_optimizer_steps: int = 0
    """The highest counts of workers of earlier generations, on this node, by their heartbeats."""
    _deadline_s: float | None = None
    _starts_cold: bool = False

    def listen(
        self,
        report: Callable[[events.Event], None],
        start_task: Callable[[Coroutine[None, None, None]], asyncio.Task[None]],
    ) -> None:
        """Listen to the guard from now on, in the event loop.

        Args:
            report: takes each event.
            start_task: starts a coroutine whose error ends the agent.
        """
        self.report, self.start_task = report, start_task
        self.collectives.parking.on_news = self._parking_news
        self._listen_to_guard()

    # -- what the node's state machine decides ------------------------------------------------------

    def set_deadline(self, at_boottime_s: float | None) -> None:
        """Let no worker run after this moment (CLOCK_BOOTTIME); None: let none run."""
        self._deadline_s = at_boottime_s
        self.guards.present.set_deadline(at_boottime_s)

    def start(self, context: WorkerContext, heartbeats: HeartbeatFile, *, apart: bool = False) -> None:
        """Have the guard start the workers as soon as it may; ``Spawned`` or ``WorkersFailed`` follows.

        ``apart``: from any world; they park before they have a place in one. ``WarmedUp`` follows.
        """
        if self.wants_cold and context.warm and not self._starts_cold:
            self._starts_cold = True
            self.report(guard_events.Cold(_TOO_LATE, ""))
        context.warm = context.warm and not self._starts_cold
        self.present = Generation(self, context, heartbeats, self.waiting, is_apart=apart)
        self.start_task(run_apart(self.present) if apart else run_generation(self.present))

    @property
    def waiting(self) -> Parked | None:
        """Parked workers that can go on; None: there are none, or all have ended."""
        return self.parked if self.parked is not None and self.parked.pids else None

    def release_starts(self) -> None:
        """Let the present guard start workers: it is on record."""
        self.may_start = True
        if self.present is not None:
            self.present.news.set()

    def stop(
        self, grace: Grace, *, dump_stacks: bool = False, may_save: bool = False, may_park: bool = False
    ) -> None:
        """Send the signal, and SIGKILL after the grace; ``WorkersCleared`` follows when nothing is left.

        Before a restart, SIGKILL comes also when the workers make no progress. ``may_save``: nothing has failed, so
        that a worker that does now is reported. ``may_park``: workers that can may park instead.
        """
        if self.present is not None:
            self.present.stop(grace, dump_stacks, may_save, may_park)
        elif self.parked is not None and not may_park:
            self.start_task(self._clear_parked(self.parked))
        else:
            asyncio.get_running_loop().call_soon(self._report_idle)

    def _report_idle(self) -> None:
        if self.present is None:
            self.report(events.WorkersCleared(parked=len(self.parked.pids) if self.parked is not None else 0))

    async def _clear_parked(self, parked: Parked) -> None:
        await parked.end(self.guards.present)
        self.report(events.WorkersCleared())

    def _parking_news(self, slot: int) -> None:
        if self.present is not None:
            take_in_news(self.present, slot)

    def notify(self, notice: Notice, stopped_s: float) -> events.Notified:
        """Give the workers the notice; they are stopped at ``stopped_s`` (CLOCK_BOOTTIME).

        Workers that do not handle notices, but the notice signal, get that if the run has to end at that time. Others
        are not affected.

        Returns:
            What is known of the workers here.
        """
        if self.present is None or self.present.gone is not None:
            return events.Notified(is_delivered=False)
        return self.present.notify(notice, stopped_s)

    def hang(self, generation: int, failure: Failure) -> None:
        """Report a hang of the workers of this generation, if they still run."""
        if self.present is not None and self.present.number == generation and self.present.alive():
            self.present.fail(failure)

    # -- what is known of the workers ---------------------------------------------------------------

    @property
    def progress(self) -> Progress | None:
        """The progress of the present workers; None while none runs."""
        generation = self._in_world
        return generation.progress if generation is not None and generation.gone is None else None

    @property
    def handles_notices(self) -> bool:
        """True if a running worker handles notices."""
        return self._in_world is not None and self._in_world.handles_notices

    @property
    def _in_world(self) -> Generation | None:
        return self.present if self.present is not None and not self.present.is_apart else None

    def take_in_steps(self, workers: Generation) -> None:
        """Count these workers among the earlier ones; they have ended."""
        cells, slots = workers.heartbeats, workers.pids
        self.reached_step = max(self.reached_step, *(cells.read(slot)[1] for slot in slots), 0)
        counts = map(cells.optimizer_steps, slots)
        self.reached_optimizer_steps = max(self.reached_optimizer_steps, *counts, 0)

    def is_passed_by(self, workers: Generation) -> bool:
        """Return whether one of these workers got further, by its steps or by heartbeats without steps.

        A worker that reports neither did if it made more optimizer steps.
        """
        kept = workers.parked.pids if workers.parked is not None else {}
        for slot, pid in workers.pids.items():
            beats, step = workers.heartbeats.read(slot)
            if step > self.reached_step if step else bool(beats):
                return True
            reached = 0 if kept.get(slot) == pid else self.reached_optimizer_steps  # it did not begin again
            if not step and workers.heartbeats.optimizer_steps(slot) > reached:
                return True
        return False

    # -- the guard ----------------------------------------------------------------------------------

    def _listen_to_guard(self) -> None:
        asyncio.get_running_loop().add_reader(self.guards.present.fileno(), self._guard_readable)

    def close(self) -> None:
        """Listen to the guard no more."""
        if self.guards.present.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self.guards.present.fileno())

    def _guard_readable(self) -> None:
        for event in self.guards.present.read_events():
            if isinstance(event, guard_events.GuardLost):
                self._replace_guard(event)
                return
            number, generation = getattr(event, "generation", None), self.present
            if generation is not None and number in (None, generation.number):
                generation.take_in(event)
            elif number is None:
                self.report(event)
            elif self.parked is not None and number == self.parked.generation:
                self._parked_event(self.parked, event)
            # Others are of an earlier generation, such as the answer to a repeated stop.

    def _parked_event(self, parked: Parked, event: guard_events.GuardEvent) -> None:
        parked.take_in(event)
        if parked.gone.is_set():
            self.parked = None
        if isinstance(event, guard_events.Fenced):
            self.report(event)

    def _replace_guard(self, lost: guard_events.GuardLost) -> None:
        """Start another guard; the workers died with theirs (parent-death signal), their children fell to us."""
        self.close()
        self.may_start = False
        self.guards.replace()
        self._listen_to_guard()
        self.guards.present.set_deadline(self._deadline_s)
        self.report(lost)
        if self.parked is not None:
            self._parked_event(self.parked, lost)
        if self.present is not None:
            self.present.take_in(lost)
