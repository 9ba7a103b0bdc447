"""The workers of one generation on this node, from their start until nothing of them is left.

Each generation is one coroutine, :func:`run_generation`: where it stands is the state of its workers. What happens to
them is noted in :class:`Generation` and wakes it; what became of them is reported as events
(:data:`~elastic_agent.agent.events.Event`). Nothing here blocks. Whatever a worker leaves behind (daemonised children
too) is ended before a generation counts as stopped or succeeded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from elastic_agent import worker_variables as variables
from elastic_agent.agent import events
from elastic_agent.agent.tasks import in_this_loop, wait_for
from elastic_agent.client._cells import HeartbeatFile
from elastic_agent.diagnosis.known_errors import signal_name
from elastic_agent.files import with_remedy
from elastic_agent.linux import boottime_s, catches, is_frozen
from elastic_agent.logs import get_logger
from elastic_agent.protocol import PROMPT, Failure, FailureKind, Grace, Notice
from elastic_agent.transport import StoreLostError, run_abandonable
from elastic_agent.workers.cleanup import CLEANUP_LIMIT_S, Cleanup, SweepReport
from elastic_agent.workers.context import WorkerContext
from elastic_agent.workers.end import WorkerEnd
from elastic_agent.workers.guard import client as guard_events

from .endings import (
    log_cleanup,
    protocol_failure,
    read_ends,
    start_failure,
    warn_of_unsaved,
    with_memory,
)
from .interruptions import SPREAD_S, Interruptions
from .parking import Parked, can_park, go_on, stop_after_parking, until_may_start
from .stalls import Progress, StallWatch

if TYPE_CHECKING:
    from .runner import Runner

STACKS_SIGNAL = int(signal.SIGRTMIN) + 6
"""A real-time signal that neither glibc, Python, torch nor NCCL uses."""

NOTICE_POLL_EVERY_S = (0.05, 5.0)
"""The shortest and longest pause between checks whether workers handle notices; it grows."""

FINAL_OUTPUT_S = 2.0
"""The time for reading a failed worker's files."""

SHOWN_S = 1.0
"""The delay of the report of workers' ends if a terminal has not taken their last lines yet."""

ANSWERED_S = 0.02
"""The time that the other workers have to send their last collectives when one has aborted."""

STACKS_TIME_S = 0.3
"""The time that workers have to write their stacks before they are stopped."""

EXPLAINED_S = 60.0
"""The time for reading how the workers ended; nothing waits for so long."""

EXPLAIN_AFTER_S = 0.2
"""After a failure the next workers start first: reading how the last ones ended takes tens of milliseconds."""


@dataclass(eq=False, repr=False)
class Generation:
    """The workers of one generation: facts known of them, and means to stop them; see :func:`run_generation`."""

    group: Runner
    context: WorkerContext
    heartbeats: HeartbeatFile
    parked: Parked | None
    """The workers among these that go on."""
    _: KW_ONLY
    is_apart: bool = False
    """They are started apart from any world, and reports about them concern no generation."""

    def __post_init__(self) -> None:
        group = self.group
        self.guard, self.number = group.guards.present, self.context.generation
        self.cleanup = Cleanup(self.guard.pid) if self.parked is None else self.parked.cleanup.for_next()
        self.may_park = False
        """The workers that can may park instead of being stopped."""
        self.failure: Failure | None = None
        """Why the workers are to be stopped, if it is not by the exit of one of them: a hang, or a failed start."""
        self.gone: guard_events.Stopped | guard_events.GuardLost | None = None
        """No process is left."""
        self.has_started = self.has_failed = False
        self.is_interrupted = False
        """A worker was ended by a signal that makes the agent stop, too."""
        self.is_fenced = False
        """The lease ended, so that other nodes may have begun the next generation."""
        self.stopped_s: float | None = None
        """When the agent began to stop the workers (CLOCK_BOOTTIME)."""
        self.restarts = False
        """They are stopped because one failed, and this node goes on with the next ones."""
        self.saves_on: signal.Signals | None = None
        """The signal on which they may save; None: none was sent, or they are stopped because of a failure."""
        self.stalls = StallWatch(
            self.number,
            self.alive,
            self.heartbeats,
            group.collectives,
            group.settings.hang_timeout,
            group.report,
        )
        self._interruptions = Interruptions(group.stop_signals, self.context.ignored_signals)
        self._notice_sent: set[int] = set()
        self.news = asyncio.Event()
        """Has the coroutine look at what has changed."""

    # -- what happens -------------------------------------------------------------------------------

    async def until(self, test: Callable[[], object], timeout_s: float | None = None) -> None:
        """Wait until the test holds, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not test():
                    self.news.clear()
                    await self.news.wait()

    def take_in(self, event: guard_events.GuardEvent) -> None:
        """Note and report an event of the guard."""
        self.context.handle(event)
        match event:
            case guard_events.Spawned(pids=pids):
                self.cleanup.started()
                if not self.is_apart:
                    self.group.collectives.begin(self.number)  # before these workers are reported
                elif self.parked is not None:
                    self.group.collectives.parking.forget_replaced(self.parked, pids)
                if self.parked is not None and not self.is_apart:
                    self.group.start_task(go_on(self, self.parked, event))
                    self.news.set()
                    return  # they are reported when they do
            case guard_events.SpawnFailed(slot=slot, error=error):
                self.fail(start_failure(self.group.node_id, error, max(slot, 0)))
                return
            case guard_events.Signalled(signum=signum):
                self._note_signal(signum)
                return
            case guard_events.Stopped() if self.gone is not None:
                return  # the answer to a repeated stop
            case guard_events.Stopped():
                self.gone = event
            case guard_events.GuardLost(returncode=returncode):
                why = f"the guard process of {self.group.node_id} died ({returncode})"
                self.fail(Failure(FailureKind.WORKER, why))
                self.gone = event
            case guard_events.Fenced():
                self.is_fenced = True
        of_worker = guard_events.Spawned | guard_events.Exited | guard_events.Stopped
        is_reported = not (self.is_apart and isinstance(event, of_worker))
        if is_reported and not isinstance(event, guard_events.GuardLost):  # reported for the whole node
            self.group.report(event)
        self.news.set()

    def fail(self, failure: Failure) -> None:
        """Note why the workers are to be stopped, if they are not to be in any case."""
        if not (self.is_to_end() or self.has_failed):
            self.failure = failure
            self.news.set()

    def _note_signal(self, signum: int) -> None:
        """Note which workers a signal reached that the guard received: those that run, or have just ended."""
        if self.gone is None:
            since_s = boottime_s() - SPREAD_S
            ended = {slot: None for slot, exited in self.exits.items() if exited.at_boottime_s >= since_s}
            self._interruptions.guard_received(signum, {**self.alive(), **ended})

    # -- what is known ------------------------------------------------------------------------------

    @property
    def exits(self) -> Mapping[int, WorkerEnd]:
        """The ends of workers, by slot, in this order."""
        return self.context.exits

    @property
    def pids(self) -> Mapping[int, int]:
        """The workers' processes by slot; empty until all are started."""
        return self.context.pids

    @property
    def unkillable(self) -> tuple[int, ...]:
        """The processes that are left although no user code of theirs runs again."""
        return self.gone.unkillable if isinstance(self.gone, guard_events.Stopped) else ()

    @property
    def kept(self) -> dict[int, int]:
        """The processes that are parked, by slot, although no other is left."""
        return self.gone.kept if isinstance(self.gone, guard_events.Stopped) else {}

    def is_to_end(self) -> bool:
        """Return whether the ends of workers say nothing any more."""
        return self.stopped_s is not None or self.gone is not None or self.failure is not None

    def alive(self) -> dict[int, int]:
        """Return the processes of the workers that have not ended."""
        return {slot: pid for slot, pid in self.pids.items() if slot not in self.exits}

    @property
    def handles_notices(self) -> bool:
        return any(map(self.heartbeats.handles_notices, self.pids))

    @property
    def progress(self) -> Progress:
        """The progress of the workers."""
        pids, cells = self.alive(), self.heartbeats
        steps = {slot: cells.read(slot)[1] for slot in pids}
        answers = {slot: answer for slot, answer in self.group.collectives.workers.items() if slot in pids}
        counts = {slot: cells.optimizer_steps(slot) for slot in pids}
        stalled_s = self.stalls.stalled_s
        return Progress(self.number, pids, steps, dict(self.exits), answers, stalled_s, counts)

    # -- what is done to them -----------------------------------------------------------------------

    def start(self) -> None:
        """Have the guard start the workers."""
        parking = self.group.collectives.parking
        if self.is_apart:
            generation = int(self.context.variables(0)[variables.GENERATION])
            self.group.collectives.begin(generation, anew=True)
        parking.clear()  # what was said in the last world, or before the first one
        if self.is_apart and self.parked is not None:
            parking.can.update(self.parked.peers)
            parking.have_parked.update(self.parked.pids)
        try:
            self.context.start()
            self.has_started = True
            self.group.parked = None
        except (OSError, ValueError, RuntimeError) as error:
            self.fail(start_failure(self.group.node_id, with_remedy(error)))

    def stop(self, grace: Grace, dump_stacks: bool, may_save: bool, may_park: bool) -> None:
        """Stop the workers; see :meth:`Runner.stop`. A guard that is frozen itself is killed: then its end follows."""
        settings = self.group.settings
        grace_s = 0.0 if grace is Grace.NONE or self.is_apart else settings.shutdown_timeout
        idle_s = settings.restart_idle if grace is Grace.RESTART else None
        signum = self.group.stop_signals.for_workers if grace is Grace.DRAIN else signal.SIGTERM
        self.restarts = grace is Grace.RESTART
        if self.stopped_s is None:
            if may_save and grace_s > 0 and self.pids and not (self.has_failed or self.failure):
                self.saves_on = signum
            self.stopped_s = boottime_s()
            self.may_park = may_park and can_park(self)
        self.may_park &= may_park
        self.news.set()
        if self.gone is not None or not self.has_started:
            return
        self.cleanup.inspect()
        if is_frozen(self.guard.pid):
            get_logger().error(
                "the guard process is frozen and cannot stop the workers; killing it together with the workers"
            )
            os.kill(self.guard.pid, signal.SIGKILL)
        elif dump_stacks and grace_s > 0 and self._dump_stacks():
            later = asyncio.get_running_loop().call_later
            later(STACKS_TIME_S, lambda: self._stop_by_guard(grace_s, signum, idle_s))
        elif self.may_park:
            self.group.start_task(stop_after_parking(self, grace_s, signum, idle_s))
        else:
            self._stop_by_guard(grace_s, signum, idle_s)

    def _stop_by_guard(self, grace_s: float, signum: int, idle_s: float | None) -> None:
        if self.gone is None:
            self.guard.stop(grace_s, signum, idle_s=idle_s)

    def _dump_stacks(self) -> bool:
        """Have the workers that support it, and have not sent where they are, write the stacks of their threads."""
        answers = self.group.collectives.workers
        answered = {slot for slot, answer in answers.items() if answer.stack and not answer.is_silent}
        able = {
            slot: pid
            for slot, pid in self.alive().items()
            if slot not in answered and catches(pid, STACKS_SIGNAL)
        }
        if able:
            get_logger().warning(
                f"workers of generation {self.number} are writing their stacks to stderr", slots=sorted(able)
            )
        for pid in able.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACKS_SIGNAL)
        return bool(able)

    def notify(self, notice: Notice, stopped_s: float) -> events.Notified:
        """Give the workers the notice; see :meth:`Runner.notify`. Those that are still to be started find it then."""
        self.heartbeats.notify(notice.serial, notice.cause.value, int(stopped_s * 1e9))
        alive = self.alive()
        if not alive:
            return events.Notified(is_delivered=True)
        handling = sum(self._handles(slot, pid, notice) for slot, pid in alive.items())
        stop = self.group.stop_signals.for_workers
        return events.Notified(True, handling, stop, sum(catches(pid, stop) for pid in alive.values()))

    def _handles(self, slot: int, pid: int, notice: Notice) -> bool:
        """Return whether a worker handles notices or the notice signal; in the latter case send it the signal."""
        if self.heartbeats.handles_notices(slot):
            return True
        signum = self.group.settings.notice_signum
        if signum is None or notice.cause in PROMPT or not catches(pid, signum):
            return False
        if self.group.sends_notice_signal:
            self._notice_sent.add(slot)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        return True

    # -- how they end -------------------------------------------------------------------------------

    async def ended_in_order(self, exited: WorkerEnd) -> bool:
        """Return whether a worker has succeeded, has saved and left, or was ended by a signal to all processes."""
        slot, code = exited.slot, exited.returncode
        if self.heartbeats.left(slot):
            if code != 0:
                who = f"worker {self.group.node_id}/{slot}"
                get_logger().warning(
                    f"{who} saved and left, then exited with {code}; treated as a clean exit"
                )
            return True
        if slot in self._notice_sent:
            self._report_interrupted(exited, signal.Signals[self.group.settings.notice_signal])
            return True
        suspects = self._interruptions.suspects(slot, code)
        if suspects and not self.group.stop_signals.received(suspects):
            await self.until(self.is_to_end, SPREAD_S)  # by then the agent has received it, or never will
        if self.group.stop_signals.received(suspects):
            self._report_interrupted(exited, min(suspects))
            return True
        return code == 0

    def _report_interrupted(self, exited: WorkerEnd, signum: int) -> None:
        """Report a worker that ended because its node is to stop: neither a failure nor a success."""
        name, code, slot = signal_name(-signum), exited.returncode, exited.slot
        how = f"was terminated by {name}" if code < 0 else f"exited with code {code} after {name}"
        whose = "its agent sent" if slot in self._notice_sent else "the agent also received"
        summary = f"worker {self.group.node_id}/{slot} {how}, which {whose}"
        failure = Failure(FailureKind.INTERRUPTED, summary[:512], slot=slot, returncode=code)
        self.is_interrupted = True
        self.group.report(events.WorkersInterrupted(self.number, failure))

    def report_late_signals(self) -> None:
        """Report an end by a signal that the guard and the agent received later than the worker."""
        for slot, exited in self.exits.items():
            suspects = self._interruptions.suspects(slot, exited.returncode)
            if not self.heartbeats.left(slot) and self.group.stop_signals.received(suspects):
                self._report_interrupted(exited, min(suspects))
                return

    async def describe(self, exited: WorkerEnd) -> Failure:
        """Return how a worker failed, by its files if they can be read in time; a file server may hang."""
        loop, slot = asyncio.get_running_loop(), exited.slot
        answered_s = loop.time()
        if exited.returncode == -signal.SIGABRT:  # as gloo does if the collectives of workers differ
            self.group.collectives.ask_at_the_end()
            answered_s += ANSWERED_S

        def read() -> None:
            self.context.exits[slot] = self.context.with_files(exited)
            self.context.show_output(SHOWN_S)

        with contextlib.suppress(StoreLostError):  # the time is over
            await run_abandonable(read, FINAL_OUTPUT_S)
        await asyncio.sleep(max(0.0, answered_s - loop.time()))
        return protocol_failure(self._end(slot), self.group.node_id)

    def _end(self, slot: int) -> WorkerEnd:
        """Return the end of a worker with what it left in memory."""
        end = self.exits[slot]
        return with_memory(end, self.heartbeats, self.group.collectives.last_of(slot, end.pid))

    async def clear(self, in_order: bool) -> None:
        """Remove what the workers left, but do not delay the next generation by much.

        While some are parked nothing is removed: it may be theirs. That is done after the generation in which they end.
        """
        if self.kept:
            self.cleanup.close()
            return
        if not (self.is_fenced or in_order):  # ranks of other nodes may still meet, or meet again
            self.cleanup.remove(self.group.collectives.meeting_files)
        if self.cleanup.nothing_to_do:
            self.cleanup.close()
            return
        finished = asyncio.Event()

        def cleared(report: SweepReport) -> None:
            log_cleanup(report)
            finished.set()

        self.cleanup.clear(in_this_loop(cleared), self.unkillable)
        await wait_for(finished, CLEANUP_LIMIT_S)

    async def close_output(self) -> None:
        """Show the rest of the workers' output; not for longer than a moment."""
        closed, shows_output = asyncio.Event(), self.context.shows_output
        self.context.close_later(in_this_loop(closed.set))
        if shows_output:
            await wait_for(closed, SHOWN_S)

    def leave(self) -> None:
        """Note that nothing is left of these workers but parked ones: the next ones may start."""
        if self.group.present is not self:
            return
        self.group.present = None
        if self.kept:
            peers = dict(self.group.collectives.parking.can)
            left_world = not self.is_apart or (self.parked is not None and self.parked.left_world)
            self.group.parked = Parked(
                self.number, dict(self.kept), peers, self.heartbeats, self.cleanup, left_world
            )

    def explain(self, after_s: float) -> asyncio.Task[None]:
        """Report soon how each worker ended, and log which has not saved; ``after_s``: let others run first."""
        ends = [self._end(slot) for slot in sorted(self.exits)]
        return self.group.explanations.start(self._explain(ends, after_s))

    async def _explain(self, ends: list[WorkerEnd], after_s: float) -> None:
        await asyncio.sleep(after_s)
        with contextlib.suppress(StoreLostError):  # a file server hangs: nothing is known of their ends
            read = partial(read_ends, self.context, ends, self.stopped_s)
            event = await run_abandonable(read, EXPLAINED_S)
            self.group.report(event)
            stayed = (report for end, report in zip(ends, event.workers, strict=True) if not end.has_left)
            warn_of_unsaved(self.group.node_id, stayed, self.saves_on)

    async def poll_notice_handling(self) -> None:
        """Check from time to time whether a worker has begun to handle notices: then growth need not cost a step."""
        pause_s, longest_s = NOTICE_POLL_EVERY_S
        while not self.handles_notices:
            await asyncio.sleep(pause_s)
            pause_s = min(1.2 * pause_s, longest_s)
        self.group.report(events.NoticesHandled(self.number))


async def run_generation(workers: Generation) -> None:
    """Run the workers of a generation until nothing is left of them, and report what became of them."""
    group = workers.group
    try:
        await until_may_start(workers)
        if not workers.is_to_end():
            workers.start()
        await workers.until(lambda: workers.pids or workers.is_to_end())
        async with _watched(workers):
            failed = await _first_failed(workers)
        in_order = failed is None and not workers.is_to_end()
        if failed is not None:
            workers.has_failed = True
            workers.failure = await workers.describe(failed)
        if in_order:
            workers.guard.stop(0.0)  # end what the workers left behind
            await workers.until(lambda: workers.gone)
        if workers.failure is not None:
            failure = msgspec.structs.replace(workers.failure, progressed=group.is_passed_by(workers))
            group.report(events.WorkersFailed(workers.number, failure))
        if workers.has_started:
            await workers.until(lambda: workers.gone)
            await workers.clear(in_order)
        elif group.parked is not None:
            await group.parked.end(workers.guard)
        await workers.close_output()
        # Before the next workers are started, who may use the same heartbeat file.
        group.take_in_steps(workers)
        group.wants_cold |= any(map(workers.heartbeats.wants_cold, workers.pids))
        await _report_end(workers, in_order and workers.stopped_s is None and workers.failure is None)
    finally:
        workers.leave()
        if not workers.kept:
            workers.heartbeats.close()


@contextlib.asynccontextmanager
async def _watched(workers: Generation) -> AsyncIterator[None]:
    """Watch the workers' progress, and whether they handle notices."""
    watchers = [
        workers.group.start_task(work) for work in (workers.stalls.run(), workers.poll_notice_handling())
    ]
    try:
        yield
    finally:
        for watcher in watchers:
            watcher.cancel()


async def _first_failed(workers: Generation) -> WorkerEnd | None:
    """Return the first worker that fails; None when all have ended in order, or are to be stopped in any case."""
    judged = known = 0

    def has_more() -> bool:
        return workers.is_to_end() or len(workers.exits) > known

    while not workers.is_to_end():
        ended = [*workers.exits.values()]
        if judged and judged == len(workers.pids):
            return None
        if judged == len(ended) or ended[judged].stopping:
            known = len(ended)
            await workers.until(has_more)
        elif await workers.ended_in_order(ended[judged]):
            judged += 1
        else:
            return None if workers.is_to_end() else ended[judged]
    return None


async def _report_end(workers: Generation, has_succeeded: bool) -> None:
    """Report that nothing is left of the workers, so that the next ones may start."""
    group, cells, number, unkillable = workers.group, workers.heartbeats, workers.number, workers.unkillable
    if has_succeeded:
        if not workers.is_interrupted:
            workers.report_late_signals()
        workers.explain(0.0)
        workers.leave()
        if workers.is_interrupted or any(map(cells.left, workers.exits)):
            group.report(events.WorkersSaved(number, unkillable))
        else:
            group.report(events.WorkersSucceeded(number, unkillable))
        return
    in_order = (0, -(workers.saves_on or 0))
    if workers.saves_on is not None and any(end.returncode not in in_order for end in workers.exits.values()):
        # The agent may exit afterwards, so a worker that has not saved is named before.
        await asyncio.wait([workers.explain(0.0)], timeout=FINAL_OUTPUT_S)
    elif workers.has_started:
        workers.explain(EXPLAIN_AFTER_S if workers.restarts else 0.0)
    workers.leave()
    if workers.has_started or workers.stopped_s is not None:
        group.report(events.WorkersCleared(unkillable, len(workers.kept)))
