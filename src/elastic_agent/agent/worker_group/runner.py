"""Runs one generation's workers after the other on this node, through the guard.

Nothing here blocks: the guard's messages arrive in the agent's loop, and what became of the workers is reported as an
event (:data:`~elastic_agent.agent.events.Event`). Whatever a worker leaves behind (daemonised children too) is
ended before a generation counts as stopped or succeeded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable
from functools import partial

import msgspec

from elastic_agent.agent import events
from elastic_agent.client._cells import HeartbeatFile
from elastic_agent.linux import boottime_s, catches, is_frozen
from elastic_agent.logs import get_logger
from elastic_agent.protocol import PROMPT, Failure, FailureKind, Grace, Notice
from elastic_agent.workers.cleanup.generation import CLEANUP_LIMIT_S, Cleanup
from elastic_agent.workers.cleanup.shm_cleanup import SweepReport
from elastic_agent.workers.context import WorkerContext
from elastic_agent.workers.failure import signal_name
from elastic_agent.workers.guard import client as guard_events
from elastic_agent.workers.guard.client import Guard
from elastic_agent.workers.output.final_output import NOTHING_READ, FinalOutput

from .collectives import Collectives
from .endings import RESTART_S, Left, log_cleanup, noted_error, report_endings, valid_note, warn_of_unsaved
from .interruptions import SPREAD_S, Interruptions, StopSignals
from .running_workers import Graces, ReachedSteps, RunningWorkers
from .stalls import Progress, StallWatch

STACKS_SIGNAL = int(signal.SIGRTMIN) + 6
"""A real-time signal that neither glibc, Python, torch nor NCCL uses."""

NOTICE_POLL_EVERY_S = (0.05, 5.0)
"""The shortest and longest pause between checks whether workers handle notices; it grows."""

FINAL_OUTPUT_S = 2.0
"""How long reading a failed worker's files may take."""

SHOWN_S = 1.0
"""How much later the end of workers is reported if a terminal has not taken their last lines yet."""

ANSWERED_S = 0.02
"""How long the other workers may send their last collectives when one has aborted, before they are stopped."""

STACKS_TIME_S = 0.3
"""How long workers get to write their stacks before they are stopped."""

_TOO_LATE = "a line in the output of warm ones says what had no effect on preloaded packages"


class Runner:
    """The workers of this node, at most one generation at a time."""

    def __init__(
        self,
        guard: Guard,
        node_id: str,
        report: Callable[[events.Event], None],
        graces: Graces,
        hang_timeout_s: float | None,
        stop_signals: StopSignals,
        collectives: Collectives | None = None,
        notice_signal: int | None = None,
        *,
        sends_notice_signal: bool = True,
    ) -> None:
        """Run nothing yet.

        Args:
            guard: starts and stops workers.
            node_id: this node.
            report: takes each event.
            graces: how long workers get to end.
            hang_timeout_s: how long they may make no progress; 0: for ever; None: by the collectives' own time-outs.
            stop_signals: the signals that make this agent stop, and which of them it has received.
            collectives: what workers answer about their collectives.
            notice_signal: by which workers that handle it, and no notices, are told to save.
            sends_notice_signal: they get it from this agent, and not from Slurm.
        """
        self._guard = guard
        self._node_id = node_id
        self._report = report
        self.graces = graces
        self._hang_timeout_s = hang_timeout_s
        self._collectives = collectives if collectives is not None else Collectives()
        self._stop_signals = stop_signals
        self._notice_signal = notice_signal
        self._sends_notice_signal = sends_notice_signal
        self._running: RunningWorkers | None = None
        self._reached = ReachedSteps()
        """That a worker of an earlier generation reported by its heartbeats."""
        self._wants_cold = self._starts_cold = False
        """A worker of an earlier generation was not what a cold one would be; later ones start cold."""
        self._timer: asyncio.TimerHandle | None = None
        """The stop that lets the workers write their stacks first, or the end of the cleanup."""
        self._notice_poll_timer: asyncio.TimerHandle | None = None
        """The next check whether workers handle notices."""

    @property
    def pids(self) -> list[int]:
        """Processes of the workers that run now."""
        return list(self._running.pids.values()) if self._running is not None else []

    @property
    def progress(self) -> Progress | None:
        """What the present workers do; None while none runs."""
        running = self._running
        if running is None or running.gone:
            return None
        pids = {slot: pid for slot, pid in running.pids.items() if slot not in running.exited}
        steps = {slot: running.heartbeats.read(slot)[1] for slot in pids}
        stalled_s = running.stalls.stalled_s if running.stalls is not None else None
        answers = {slot: answer for slot, answer in self._collectives.workers.items() if slot in pids}
        counts = {slot: running.heartbeats.optimizer_steps(slot) for slot in pids}
        return Progress(running.generation, pids, steps, dict(running.exited), answers, stalled_s, counts)

    def start(self, context: WorkerContext, heartbeats: HeartbeatFile) -> None:
        """Have the guard start the workers; ``Spawned`` or ``WorkersFailed`` follows."""
        cleanup = Cleanup(self._guard.pid)
        if self._wants_cold and context.warm and not self._starts_cold:
            self._starts_cold = True
            self._report(guard_events.Cold(_TOO_LATE, ""))
        context.warm = context.warm and not self._starts_cold
        try:
            context.start()
        except BaseException:
            heartbeats.close()
            raise  # nothing of this generation runs, so nothing of it is to be stopped
        interruptions = Interruptions(self._stop_signals, context.ignored_signals)
        self._running = RunningWorkers(context, heartbeats, cleanup, interruptions)

    def stop(self, grace: Grace, *, dump_stacks: bool = False, may_save: bool = False) -> None:
        """Send the signal, and SIGKILL after the grace; ``WorkersCleared`` follows when nothing is left.

        Before a restart, SIGKILL comes also when the workers make no progress. A guard that is frozen itself is killed:
        then its end follows. ``may_save``: nothing has failed, so that a worker that does now is reported.
        """
        grace_s, idle_s = self.graces.of(grace), self.graces.idle_s(grace)
        signum = self._stop_signals.for_workers if grace is Grace.DRAIN else signal.SIGTERM
        if self._running is not None:
            self._running.stopping, self._running.restarts = True, grace is Grace.RESTART
            if self._running.stopped_s is None:
                self._running.stopped_s = boottime_s()
                if may_save and grace_s > 0 and not self._running.failed and self._running.pids:
                    self._running.saves_on = signum
            self._stop_watching(self._running)
            if self._running.gone:
                return
            self._running.cleanup.inspect()
        if is_frozen(self._guard.pid):
            get_logger().error(
                "the guard process is frozen and cannot stop the workers; killing it together with the workers"
            )
            os.kill(self._guard.pid, signal.SIGKILL)
            return  # its end is noticed
        if dump_stacks and self._stacks() and grace_s > 0:
            self._cancel_timer()
            stop = partial(self._guard.stop, grace_s, signum, idle_s=idle_s)
            self._timer = asyncio.get_running_loop().call_later(STACKS_TIME_S, stop)
        else:
            self._guard.stop(grace_s, signum, idle_s=idle_s)

    def notify(self, notice: Notice, stopped_s: float) -> events.Notified:
        """Give the workers the notice; they are stopped at ``stopped_s`` (CLOCK_BOOTTIME).

        Workers that do not handle notices, but the notice signal, get that if the run has to end at that time. Others
        are not affected.

        Returns:
            What is known of the workers here.
        """
        running = self._running
        if running is None or running.gone:
            return events.Notified(is_delivered=False)
        running.heartbeats.notify(notice.serial, notice.cause.value, int(stopped_s * 1e9))
        alive = {slot: pid for slot, pid in running.pids.items() if slot not in running.exited}
        handling = [self._tell(running, slot, pid, notice) for slot, pid in alive.items()]
        if not handling:
            return events.Notified(is_delivered=True)
        stop = self._stop_signals.for_workers
        catching = sum(catches(pid, stop) for pid in alive.values())
        return events.Notified(True, sum(handling), stop, catching)

    def _tell(self, running: RunningWorkers, slot: int, pid: int, notice: Notice) -> bool:
        """Send the notice signal to a worker that handles it, and no notices; return whether it handles either."""
        if running.heartbeats.handles_notices(slot):
            return True
        signum = self._notice_signal
        if signum is None or notice.cause in PROMPT or not catches(pid, signum):
            return False
        if self._sends_notice_signal:
            running.notice_sent.add(slot)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        return True

    @property
    def handles_notices(self) -> bool:
        """Whether a running worker handles notices."""
        running = self._running
        return running is not None and any(running.heartbeats.handles_notices(slot) for slot in running.pids)

    def _stop_watching(self, running: RunningWorkers) -> None:
        if running.stalls is not None:
            running.stalls.stop()
        if self._notice_poll_timer is not None:
            self._notice_poll_timer.cancel()
            self._notice_poll_timer = None

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stacks(self) -> bool:
        """Have the workers that support it, and have not sent where they are, write the stacks of their threads."""
        running = self._running
        if running is None:
            return False
        answered = {
            slot
            for slot, answer in self._collectives.workers.items()
            if answer.stack and not answer.is_silent
        }
        able = {
            slot: pid
            for slot, pid in running.pids.items()
            if slot not in {*running.exited, *answered} and catches(pid, STACKS_SIGNAL)
        }
        if not able:
            return False
        get_logger().warning(
            f"workers of generation {running.generation} are writing their stacks to stderr",
            slots=sorted(able),
        )
        for pid in able.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACKS_SIGNAL)
        return True

    def abandon(self, lost: guard_events.GuardLost) -> None:
        """Drop what belonged to the workers, which are gone with their guard."""
        running, self._running = self._running, None
        self._cancel_timer()
        if running is not None:
            self._stop_watching(running)
            running.context.handle(lost)
            self._report_endings(running)
            running.context.close_later()
            self._close_heartbeats(running)
            running.cleanup.clear(lambda _: None)

    # -- events of the guard --------------------------------------------------------------------

    def handle(self, event: guard_events.GuardEvent) -> None:
        """Handle a message of the guard."""
        if self._running is not None:
            self._running.context.handle(event)
        match event:
            case guard_events.Spawned():
                self._spawned(event)
            case guard_events.SpawnFailed(generation=generation, slot=slot, error=error):
                self._spawn_failed(generation, slot, error)
            case guard_events.Exited():
                self._exited(event)
            case guard_events.Signalled(signum=signum):
                self._guard_signalled(signum)
            case guard_events.Stopped():
                self._stopped(event)
            case _:
                if isinstance(event, guard_events.Fenced) and self._running is not None:
                    self._running.fenced = True
                self._report(event)

    def _spawned(self, event: guard_events.Spawned) -> None:
        running = self._running
        if running is None or running.generation != event.generation:
            return
        running.cleanup.started(event.pids.values())
        self._collectives.begin(running.generation)  # before these workers are reported
        self._report(event)
        if not running.stopping:
            running.stalls = StallWatch(
                running.generation,
                partial(self._watched, running),
                running.heartbeats,
                self._collectives,
                self._hang_timeout_s,
                self._report,
            )
            running.stalls.start()
            self._poll_notice_handling(NOTICE_POLL_EVERY_S[0])

    def _spawn_failed(self, generation: int, slot: int, error: str) -> None:
        running = self._running
        if running is None or running.generation != generation or running.stopping:
            return
        summary = f"{self._node_id} could not start its workers: {error}"
        failure = Failure(FailureKind.START, summary[:512], slot=max(slot, 0))
        self._report(events.WorkersFailed(generation, failure))

    def _exited(self, event: guard_events.Exited) -> None:
        running = self._running
        if running is None or running.generation != event.generation:
            return
        self._report(event)
        if running.stopping or running.failed or event.stopping:
            return
        suspects = running.interruptions.suspects(event.slot, event.returncode)
        if running.heartbeats.left(event.slot):
            self._left(running, event)
        elif event.slot in running.notice_sent and self._notice_signal is not None:
            self._interrupted(running, event, frozenset({self._notice_signal}))
        elif not suspects:
            self._classify(running, event)
        elif self._stop_signals.received(suspects):
            self._interrupted(running, event, suspects)
        else:
            running.held.append(event)
            asyncio.get_running_loop().call_later(SPREAD_S, self._release, running, event, suspects)

    def _release(self, running: RunningWorkers, event: guard_events.Exited, suspects: frozenset[int]) -> None:
        """Judge an end that was held back: by now the agent has received the signal too, or never will."""
        if self._running is not running or running.stopping or running.failed:
            return
        running.held.remove(event)
        if self._stop_signals.received(suspects):
            self._interrupted(running, event, suspects)
        else:
            self._classify(running, event)

    def _classify(self, running: RunningWorkers, event: guard_events.Exited) -> None:
        """Judge an end whose cause is the worker itself, or an error that it encountered."""
        if event.returncode == 0:
            self._end_if_all_have(running)
        else:
            running.failed = True
            first = next((end for end in running.held if end.returncode != 0), event)
            self._read_final_output(running, first)

    def _left(self, running: RunningWorkers, event: guard_events.Exited) -> None:
        if event.returncode != 0:
            who = f"worker {self._node_id}/{event.slot}"
            get_logger().warning(
                f"{who} saved and left, then exited with {event.returncode}; treated as a clean exit"
            )
        self._end_if_all_have(running)

    def _interrupted(
        self, running: RunningWorkers, event: guard_events.Exited, suspects: frozenset[int]
    ) -> None:
        self._report_interrupted(running, event, suspects)
        self._end_if_all_have(running)

    def _report_interrupted(
        self, running: RunningWorkers, event: guard_events.Exited, suspects: frozenset[int]
    ) -> None:
        """Report a worker that ended because its node is to stop: neither a failure nor a success."""
        name = signal_name(-min(suspects))
        how = (
            f"was terminated by {name}"
            if event.returncode < 0
            else f"exited with code {event.returncode} after {name}"
        )
        whose = (
            "which its agent sent" if event.slot in running.notice_sent else "which the agent also received"
        )
        summary = f"worker {self._node_id}/{event.slot} {how}, {whose}"
        running.interrupted = True
        failure = Failure(
            FailureKind.INTERRUPTED, summary[:512], slot=event.slot, returncode=event.returncode
        )
        self._report(events.WorkersInterrupted(event.generation, failure))

    def _look_for_late_signals(self, running: RunningWorkers) -> None:
        """Report an end by a signal that the guard and the agent received later than the worker."""
        for slot, event in running.exited.items():
            suspects = running.interruptions.suspects(slot, event.returncode)
            if not running.heartbeats.left(slot) and self._stop_signals.received(suspects):
                self._report_interrupted(running, event, suspects)
                return

    def _end_if_all_have(self, running: RunningWorkers) -> None:
        if len(running.exited) == len(running.pids) and not running.held:
            running.succeeding = True
            self._guard.stop(0.0)  # end what the workers left behind

    def _guard_signalled(self, signum: int) -> None:
        running = self._running
        if running is not None and not running.gone:
            since_s = boottime_s() - SPREAD_S
            pids: dict[int, int | None] = {**running.pids}
            for slot, event in running.exited.items():
                pids[slot] = None
                if event.at_boottime_s < since_s:
                    del pids[slot]
            running.interruptions.guard_received(signum, pids)

    def _read_final_output(self, running: RunningWorkers, event: guard_events.Exited) -> None:
        """Report how a worker failed as soon as its files have been read; do not wait for a file server that hangs."""
        loop = asyncio.get_running_loop()
        context, slot = running.context, event.slot
        answered_s = loop.time()
        if event.returncode == -signal.SIGABRT:  # as gloo does if the collectives of workers differ
            self._collectives.ask_at_the_end()
            answered_s += ANSWERED_S

        def read() -> None:
            output = context.final_output(slot)
            context.show_output(SHOWN_S)
            with contextlib.suppress(RuntimeError):  # the loop is closed: the agent has ended
                loop.call_soon_threadsafe(loop.call_at, answered_s, deliver, output)

        def deliver(output: FinalOutput) -> None:
            late.cancel()
            if self._running is running and not running.reported:
                running.reported = True
                failure = self._failure(running, event, output)
                self._report(events.WorkersFailed(event.generation, failure))

        late = loop.call_later(FINAL_OUTPUT_S, deliver, NOTHING_READ)
        threading.Thread(target=read, name="final-output", daemon=True).start()

    def _failure(self, running: RunningWorkers, event: guard_events.Exited, output: FinalOutput) -> Failure:
        note = valid_note(running.heartbeats.note(event.slot), event)
        reported = running.context.failure(event, output, "" if output.no_room else noted_error(note))
        return Failure(
            FailureKind.WORKER,
            reported.summary(self._node_id)[:512],
            reported.tail[-4096:],
            slot=event.slot,
            returncode=event.returncode,
            signature=reported.signature,
            error=reported.message[:512],
            progressed=self._reached.is_passed_by(running),
        )

    def _report_endings(
        self, running: RunningWorkers, then: Callable[[], None] = lambda: None, after_s: float = 0.0
    ) -> None:
        cells = running.heartbeats
        left_behind = {
            slot: Left(
                cells.read(slot)[1],
                cells.note(slot),
                self._collectives.last_of(slot, running.exited[slot].pid),
            )
            for slot in running.exited
        }
        saved = [slot for slot in running.exited if cells.left(slot)]

        def ended(event: events.GenerationEnded) -> None:
            self._report(event)
            ends = [end for end in event.workers if end.report.slot not in saved]
            warn_of_unsaved(self._node_id, ends, running.saves_on)
            then()

        report_endings(running.context, left_behind, running.stopped_s, ended, after_s)

    def _close_heartbeats(self, running: RunningWorkers) -> None:
        self._reached.take_in(running)
        self._wants_cold |= any(map(running.heartbeats.wants_cold, running.pids))
        running.heartbeats.close()

    def _stopped(self, event: guard_events.Stopped) -> None:
        running, unkillable = self._running, event.unkillable
        if running is not None and (running.generation != event.generation or running.gone):
            return  # a repeated stop command: this is the second answer
        self._cancel_timer()
        self._report(event)
        if running is None:
            self._report(events.WorkersCleared(unkillable))
            return
        running.gone = True
        if not (running.succeeding or running.fenced):  # ranks of other nodes may still meet, or meet again
            running.cleanup.remove(self._collectives.meeting_files)
        if running.cleanup.nothing_to_do:
            running.cleanup.close()
            self._all_gone(running, unkillable)
        else:
            self._clear(running, unkillable)

    def _clear(self, running: RunningWorkers, unkillable: tuple[int, ...]) -> None:
        """Remove what the workers left, but do not delay the next generation by much."""
        loop = asyncio.get_running_loop()

        def cleared(report: SweepReport) -> None:
            log_cleanup(report)
            self._all_gone(running, unkillable)

        def from_thread(report: SweepReport) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the agent has ended
                loop.call_soon_threadsafe(cleared, report)

        self._timer = loop.call_later(CLEANUP_LIMIT_S, self._all_gone, running, unkillable)
        running.cleanup.clear(from_thread, unkillable)

    def _all_gone(self, running: RunningWorkers, unkillable: tuple[int, ...]) -> None:
        """Report that nothing is left of these workers, when their last lines are shown."""
        if self._running is not running:
            return  # the guard was lost meanwhile, or this was reported before
        loop = asyncio.get_running_loop()
        report = partial(self._report_gone, running, unkillable)

        def closed() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the agent has ended
                loop.call_soon_threadsafe(report)

        if running.context.shows_output:
            loop.call_later(SHOWN_S, report)
        else:
            report()
        running.context.close_later(closed)

    def _report_gone(self, running: RunningWorkers, unkillable: tuple[int, ...]) -> None:
        """Report that nothing is left of these workers: the next ones may start."""
        if self._running is not running:
            return
        self._running = None
        self._stop_watching(running)
        self._cancel_timer()
        if running.succeeding and not running.stopping and not running.interrupted:
            self._look_for_late_signals(running)
        ended_early = running.interrupted or any(map(running.heartbeats.left, running.exited))
        if running.succeeding and not running.stopping:
            self._report_endings(running)
            if ended_early:
                self._report(events.WorkersSaved(running.generation, unkillable))
            else:
                trained = any(
                    slot not in self._collectives.idle or any(running.heartbeats.read(slot))
                    for slot in running.pids
                )
                self._report(events.WorkersSucceeded(running.generation, unkillable, trained))
        else:
            self._clear_when_explained(running, unkillable)
        self._close_heartbeats(running)

    def _clear_when_explained(self, running: RunningWorkers, unkillable: tuple[int, ...]) -> None:
        """Report that the workers are gone; before that, that one has not saved: the agent may exit afterwards."""
        cleared = events.WorkersCleared(unkillable)
        expected = (0, -(running.saves_on or 0))
        if running.saves_on is None or all(end.returncode in expected for end in running.exited.values()):
            self._report_endings(running, after_s=RESTART_S if running.restarts else 0.0)
            self._report(cleared)
            return
        loop = asyncio.get_running_loop()
        late = loop.call_later(FINAL_OUTPUT_S, self._report, cleared)

        def explained() -> None:
            if loop.time() < late.when():
                late.cancel()
                self._report(cleared)

        self._report_endings(running, explained)

    # -- progress -------------------------------------------------------------------------------

    def _watched(self, running: RunningWorkers) -> dict[int, int] | None:
        if self._running is not running or running.failed or running.stopping or running.succeeding:
            return None
        return {slot: pid for slot, pid in running.pids.items() if slot not in running.exited}

    def hang(self, generation: int, failure: Failure) -> None:
        """Report a hang of the workers of this generation."""
        running = self._running
        if running is None or running.generation != generation or self._watched(running) is None:
            return
        running.failed = True
        failure = msgspec.structs.replace(failure, progressed=self._reached.is_passed_by(running))
        self._report(events.WorkersFailed(generation, failure))

    def _poll_notice_handling(self, pause_s: float) -> None:
        """Check from time to time whether a worker has begun to handle notices: then growth need not cost a step."""
        running = self._running
        if running is None or running.gone or running.stopping:
            return
        if self.handles_notices:
            self._report(events.NoticesHandled(running.generation))
            return
        longer_s = min(1.2 * pause_s, NOTICE_POLL_EVERY_S[1])
        self._notice_poll_timer = asyncio.get_running_loop().call_later(
            pause_s, self._poll_notice_handling, longer_s
        )
