"""Runs one generation's workers after the other on this node, through the guard.

Nothing here blocks: the guard's messages arrive in the agent's loop, and what became of the workers is told
by callbacks. Whatever a worker leaves behind (daemonised children too) is ended before a generation counts as
stopped or succeeded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from elastic_agent.agent.reporting.event_log import EventLog
from elastic_agent.client._cells import HeartbeatFile
from elastic_agent.linux import catches, is_frozen
from elastic_agent.logs import get_logger
from elastic_agent.protocol import Failure, FailureKind, Notice
from elastic_agent.workers.cleanup.generation import CLEANUP_LIMIT_S, Cleanup, Cleared
from elastic_agent.workers.cleanup.gpu_memory import GpuMemory
from elastic_agent.workers.context import WorkerContext
from elastic_agent.workers.failure import signal_name
from elastic_agent.workers.guard import client as guard_events
from elastic_agent.workers.guard.client import Guard, boottime_s
from elastic_agent.workers.output.last_words import NOTHING_READ, LastWords

from .interruptions import SPREAD_S, Interruptions, StopSignals

DEFAULT_STACKS_SIGNAL = int(signal.SIGRTMIN) + 6
"""A real-time signal that neither glibc, Python, torch nor NCCL uses."""

HANG_LOOKS_PER_TIMEOUT = 20
"""Progress is looked at this often per hang time-out."""

LOOK_AT_LEAST_EVERY_S = 5.0

NOTICE_POLL_EVERY_S = (0.05, 1.0)
"""The first pause between two looks whether workers look at notices, and the longest; it grows."""

LAST_WORDS_S = 2.0
"""How long it may take to read what a failed worker's files say."""

STACKS_TIME_S = 0.3
"""How long workers get to write their stacks before they are stopped."""


@dataclass(frozen=True)
class RunnerCallbacks:
    """What the runner reports. ``generation`` is always the one the report is about."""

    started: Callable[[int], None]
    failed: Callable[[int, Failure], None]
    succeeded: Callable[[int], None]
    saved: Callable[[int], None]
    handles_notices: Callable[[int], None]
    interrupted: Callable[[int, Failure], None]
    stopped: Callable[[tuple[int, ...]], None]
    fenced: Callable[[str], None]


@dataclass
class _Running:
    generation: int
    context: WorkerContext
    heartbeats: HeartbeatFile
    cleanup: Cleanup
    interruptions: Interruptions
    pids: Mapping[int, int] = field(default_factory=dict)
    exited: dict[int, guard_events.Exited] = field(default_factory=dict)
    held: list[guard_events.Exited] = field(default_factory=list)
    """Ends that a signal may have caused which the agent has not received yet."""
    interrupted: bool = False
    """A worker was ended by such a signal."""
    gone: bool = False
    """No process is left; what they left is being cleared away."""
    stopping: bool = False
    succeeding: bool = False
    failed: bool = False
    told: bool = False
    """How a worker failed has been told."""
    handles_notices: bool = False
    """A worker was seen to look at notices."""

    @property
    def left(self) -> list[int]:
        """Slots whose workers said that they saved and leave."""
        return [slot for slot in self.exited if self.heartbeats.left(slot)]


class Runner:
    """The workers of this node, at most one generation at a time."""

    def __init__(
        self,
        guard: Guard,
        node_id: str,
        callbacks: RunnerCallbacks,
        event_log: EventLog,
        hang_timeout_s: float,
        stop_signals: StopSignals,
        stacks_signal: int = DEFAULT_STACKS_SIGNAL,
    ) -> None:
        self._guard = guard
        self._node_id = node_id
        self._tell = callbacks
        self._event_log = event_log
        self._hang_timeout_s = hang_timeout_s
        self._stop_signals = stop_signals
        self._stacks_signal = stacks_signal
        self._gpu = GpuMemory()
        self._running: _Running | None = None
        self._timer: asyncio.TimerHandle | None = None
        """The next look at the workers' progress, or the stop that lets them write their stacks first."""
        self._notice_poll_timer: asyncio.TimerHandle | None = None
        """The next look whether workers look at notices."""
        self._log = get_logger()

    @property
    def pids(self) -> list[int]:
        """Processes of the workers that run now."""
        return list(self._running.pids.values()) if self._running is not None else []

    @property
    def step(self) -> int | None:
        """The newest step that a worker which runs now named by its heartbeat; None if none did, or only step 0."""
        running = self._running
        if running is None or running.stopping:
            return None
        beats = (running.heartbeats.read(slot) for slot in running.pids)
        return max((step for _, step in beats if step), default=None)

    def start(self, generation: int, context: WorkerContext, heartbeats: HeartbeatFile) -> None:
        """Have the guard start the workers; ``started`` or ``failed`` follows."""
        cleanup = Cleanup(self._guard.pid, self._gpu)
        try:
            context.start()
        except BaseException:
            heartbeats.close()
            raise  # nothing of this generation runs, so nothing of it is to be stopped
        self._running = _Running(
            generation,
            context,
            heartbeats,
            cleanup,
            Interruptions(self._stop_signals, context.ignored_signals),
        )

    def stop(self, grace_s: float, *, dump_stacks: bool = False) -> None:
        """SIGTERM, SIGKILL after ``grace_s``; ``stopped`` follows when nothing is left.

        A guard that is frozen itself is killed: then its end follows.
        """
        if self._running is not None:
            self._running.stopping = True
            if self._running.gone:
                return
            self._running.cleanup.look()
        if is_frozen(self._guard.pid):
            self._log.error(
                "the guard process is frozen and cannot stop the workers; killing it together with the "
                "workers"
            )
            os.kill(self._guard.pid, signal.SIGKILL)
            return  # its end is noticed
        if dump_stacks and self._stacks() and grace_s > 0:
            self._cancel_timer()
            self._timer = asyncio.get_running_loop().call_later(STACKS_TIME_S, self._guard.stop, grace_s)
        else:
            self._guard.stop(grace_s)

    def notify(self, notice: Notice) -> None:
        """Tell the workers that run; nothing they do not look at disturbs them."""
        running = self._running
        if running is None or running.gone:
            return
        deadline_s = guard_events.boottime_s() + notice.left_s
        running.heartbeats.tell(notice.serial, notice.cause.value, int(deadline_s * 1e9))
        self._event_log.write(
            "notice",
            generation=running.generation,
            serial=notice.serial,
            cause=notice.cause.value,
            left_s=notice.left_s,
            ends=notice.ends,
        )

    @property
    def handles_notices(self) -> bool:
        """Whether a worker that runs now looks at notices."""
        running = self._running
        return running is not None and any(running.heartbeats.handles_notices(slot) for slot in running.pids)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cancel_notice_poll(self) -> None:
        if self._notice_poll_timer is not None:
            self._notice_poll_timer.cancel()
            self._notice_poll_timer = None

    def _stacks(self) -> bool:
        """Ask the workers that know how for the stacks of all their threads; they go to their stderr."""
        running = self._running
        if running is None:
            return False
        able = {
            slot: pid
            for slot, pid in running.pids.items()
            if slot not in running.exited and catches(pid, self._stacks_signal)
        }
        if not able:
            return False
        self._log.warning("workers are writing their stacks to stderr", slots=sorted(able))
        for pid in able.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, self._stacks_signal)
        return True

    def abandon(self, lost: guard_events.GuardLost) -> None:
        """The guard is gone, and the workers with it: drop what belonged to them."""
        running, self._running = self._running, None
        self._cancel_timer()
        self._cancel_notice_poll()
        if running is not None:
            running.context.handle(lost)
            running.context.close_later()
            running.heartbeats.close()
            running.cleanup.clear(lambda _: None)

    # -- what the guard says --------------------------------------------------------------------

    def handle(self, event: guard_events.GuardEvent) -> None:
        """One message of the guard."""
        if self._running is not None:
            self._running.context.handle(event)
        match event:
            case guard_events.Spawned(generation=generation, pids=pids):
                self._spawned(generation, pids)
            case guard_events.SpawnFailed(generation=generation, slot=slot, error=error):
                self._spawn_failed(generation, slot, error)
            case guard_events.Exited():
                self._exited(event)
            case guard_events.Signalled(signum=signum):
                self._guard_signalled(signum)
            case guard_events.Stopped(generation=generation, unkillable=unkillable):
                self._stopped(generation, unkillable)
            case guard_events.Fenced(generation=generation, late_s=late_s):
                self._event_log.write("fenced", generation=generation, late_s=late_s)
                self._tell.fenced("the guard killed the workers when the lease expired")
            case _:
                self._report_spawner(event)

    def _report_spawner(self, event: guard_events.GuardEvent) -> None:
        match event:
            case guard_events.Warm(ready_s=ready_s):
                self._event_log.write("spawner_ready", import_s=ready_s)
            case guard_events.Cold(reason=reason, detail=detail):
                self._event_log.write("workers_cold", reason=reason)
                self._log.warning(f"workers start cold, which takes longer: {reason}")
                if detail:
                    self._log.warning(f"output of the spawner:\n{detail.rstrip()}")
            case guard_events.SpawnerDied(how=how):
                self._event_log.write("spawner_died", how=how)
                self._log.warning(
                    f"the spawner died ({how}); starting a new one, running workers are not affected"
                )
            case guard_events.WarmLate(generation=generation, importing=importing):
                why = "is still importing" if importing else "is not responding and is being replaced"
                self._log.warning(f"the spawner {why}: starting the workers of generation {generation} cold")
            case _:
                pass

    def _spawned(self, generation: int, pids: Mapping[int, int]) -> None:
        running = self._running
        if running is None or running.generation != generation:
            return
        running.pids = dict(pids)
        running.cleanup.started(pids.values())
        self._event_log.write("workers_started", generation=generation, pids=running.pids)
        if not running.stopping:
            self._tell.started(generation)
            self._watch_progress({})
            self._poll_notice_handling(NOTICE_POLL_EVERY_S[0])

    def _spawn_failed(self, generation: int, slot: int, error: str) -> None:
        running = self._running
        if running is None or running.generation != generation or running.stopping:
            return
        summary = f"{self._node_id} could not start its workers: {error}"
        self._tell.failed(generation, Failure(FailureKind.START, summary[:512], slot=max(slot, 0)))

    def _exited(self, event: guard_events.Exited) -> None:
        running = self._running
        if running is None or running.generation != event.generation:
            return
        running.exited[event.slot] = event
        self._event_log.write(
            "worker_exited",
            generation=event.generation,
            slot=event.slot,
            pid=event.pid,
            returncode=event.returncode,
            exited_boottime_s=event.at_boottime_s,
        )
        if running.stopping or running.failed or event.stopping:
            return
        suspects = running.interruptions.suspects(event.slot, event.returncode)
        if running.heartbeats.left(event.slot):
            self._left(running, event)
        elif not suspects:
            self._judge(running, event)
        elif self._stop_signals.received(suspects):
            self._interrupted(running, event, suspects)
        else:
            running.held.append(event)
            asyncio.get_running_loop().call_later(SPREAD_S, self._release, running, event, suspects)

    def _release(self, running: _Running, event: guard_events.Exited, suspects: frozenset[int]) -> None:
        """By now the agent has received the signal too, or never will."""
        if self._running is not running or running.stopping or running.failed:
            return
        running.held.remove(event)
        if self._stop_signals.received(suspects):
            self._interrupted(running, event, suspects)
        else:
            self._judge(running, event)

    def _judge(self, running: _Running, event: guard_events.Exited) -> None:
        """Nothing but the worker itself, or what it met with, is the cause of its end."""
        if event.returncode == 0:
            self._end_if_all_have(running)
        else:
            running.failed = True
            first = next((one for one in running.held if one.returncode != 0), event)
            self._read_last_words(running, first)

    def _left(self, running: _Running, event: guard_events.Exited) -> None:
        if event.returncode != 0:
            self._log.warning(
                f"worker {self._node_id}/{event.slot} saved and left, then exited with "
                f"{event.returncode}; treated as a clean exit"
            )
        self._end_if_all_have(running)

    def _interrupted(self, running: _Running, event: guard_events.Exited, suspects: frozenset[int]) -> None:
        self._tell_interrupted(running, event, suspects)
        self._end_if_all_have(running)

    def _tell_interrupted(
        self, running: _Running, event: guard_events.Exited, suspects: frozenset[int]
    ) -> None:
        """The worker ended because its node is to stop: neither a failure nor a success."""
        name = signal_name(-min(suspects))
        how = (
            f"was terminated by {name}"
            if event.returncode < 0
            else f"exited with code {event.returncode} after {name}"
        )
        summary = f"worker {self._node_id}/{event.slot} {how}, which the agent also received"
        self._log.info(summary)
        running.interrupted = True
        failure = Failure(
            FailureKind.INTERRUPTED, summary[:512], slot=event.slot, returncode=event.returncode
        )
        self._tell.interrupted(event.generation, failure)

    def _look_for_late_signals(self, running: _Running) -> None:
        """A worker may end sooner than the guard and the agent receive the signal that ended it."""
        for slot, event in running.exited.items():
            suspects = running.interruptions.suspects(slot, event.returncode)
            if not running.heartbeats.left(slot) and self._stop_signals.received(suspects):
                self._tell_interrupted(running, event, suspects)
                return

    def _end_if_all_have(self, running: _Running) -> None:
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
            running.interruptions.guard_heard(signum, pids)

    def _read_last_words(self, running: _Running, event: guard_events.Exited) -> None:
        """Tell how a worker failed as soon as its files have been read; a file server that hangs is not waited for."""
        loop = asyncio.get_running_loop()
        context, slot = running.context, event.slot

        def read() -> None:
            words = context.last_words(slot)
            with contextlib.suppress(RuntimeError):  # the loop is closed: the agent has ended
                loop.call_soon_threadsafe(tell, words)

        def tell(words: LastWords) -> None:
            late.cancel()
            if self._running is running and not running.told:
                running.told = True
                self._tell.failed(event.generation, self._failure(running, event, words))

        late = loop.call_later(LAST_WORDS_S, tell, NOTHING_READ)
        threading.Thread(target=read, name="last-words", daemon=True).start()

    def _failure(self, running: _Running, event: guard_events.Exited, words: LastWords) -> Failure:
        told = running.context.failure(event.slot, words)
        return Failure(
            FailureKind.WORKER,
            told.summary(self._node_id)[:512],
            told.tail[-4096:],
            slot=event.slot,
            returncode=event.returncode,
            signature=told.signature,
            progressed=any(running.heartbeats.read(slot)[0] for slot in running.pids),
        )

    def _stopped(self, generation: int, unkillable: tuple[int, ...]) -> None:
        running = self._running
        if running is not None and (running.generation != generation or running.gone):
            return  # one that had stopped already was told to: this is the second answer
        self._cancel_timer()
        self._event_log.write("workers_stopped", generation=generation, unkillable=list(unkillable))
        if running is None:
            self._tell.stopped(unkillable)
            return
        running.gone = True
        if running.cleanup.nothing_to_do:
            running.cleanup.close()
            self._all_gone(running, unkillable)
        else:
            self._clear(running, unkillable)

    def _clear(self, running: _Running, unkillable: tuple[int, ...]) -> None:
        """Clear away what the workers left, but do not let the next generation wait long for it."""
        loop = asyncio.get_running_loop()

        def cleared(what: Cleared) -> None:
            self._report(what)
            self._all_gone(running, unkillable)

        def from_thread(what: Cleared) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the agent has ended
                loop.call_soon_threadsafe(cleared, what)

        self._timer = loop.call_later(CLEANUP_LIMIT_S, self._all_gone, running, unkillable)
        running.cleanup.clear(from_thread, unkillable)

    def _report(self, cleared: Cleared) -> None:
        """Say what was found; nothing if nothing was."""
        shared_memory = cleared.shared_memory
        if shared_memory.removed:
            self._log.info("removed shared memory left behind by workers", files=shared_memory.removed)
        if shared_memory.unknown:
            self._log.warning(
                "kept shared memory left behind by workers: cannot determine whether other processes use it",
                files=shared_memory.unknown,
            )
        for held in shared_memory.held:
            self._log.warning(
                f"kept shared memory of the workers: {held.file} is in use by {held.process} ({held.pid})"
            )
        for holder in cleared.gpu:
            self._log.warning(
                f"GPU {holder.gpu} is not free: process {holder.pid} ({holder.process}) of the stopped "
                "workers still has memory allocated on it; the next workers may run out of memory"
            )

    def _all_gone(self, running: _Running, unkillable: tuple[int, ...]) -> None:
        """Nothing is left of these workers; the next may start."""
        if self._running is not running:
            return  # the guard was lost meanwhile, or this was told before
        self._running = None
        self._cancel_timer()
        self._cancel_notice_poll()
        if running.succeeding and not running.stopping and not running.interrupted:
            self._look_for_late_signals(running)
        left = running.left
        running.context.close_later()
        running.heartbeats.close()
        if running.succeeding and not running.stopping:
            if unkillable:  # they outlived workers that are done: no reason to take the success back
                self._log.warning(
                    "processes left behind by the workers are stuck in the kernel", pids=unkillable
                )
            ended_early = left or running.interrupted
            (self._tell.saved if ended_early else self._tell.succeeded)(running.generation)
        else:
            self._tell.stopped(unkillable)

    # -- progress -------------------------------------------------------------------------------

    def _watch_progress(self, seen: dict[int, tuple[int, float]]) -> None:
        """Look at the heartbeats by a timer of the loop; a worker that used them and stopped has failed."""
        running = self._running
        if running is None or self._hang_timeout_s <= 0 or running.failed or running.stopping:
            return
        loop = asyncio.get_running_loop()
        for slot in running.pids:
            if slot in running.exited:
                continue
            beats, step = running.heartbeats.read(slot)
            known = seen.get(slot)
            if beats and (known is None or known[0] != beats):
                seen[slot] = (beats, loop.time())
            elif known is not None and loop.time() - known[1] >= self._hang_timeout_s:
                running.failed = True
                self._tell.failed(running.generation, self._hang(slot, step))
                return
        pause_s = min(LOOK_AT_LEAST_EVERY_S, self._hang_timeout_s / HANG_LOOKS_PER_TIMEOUT)
        self._timer = loop.call_later(pause_s, self._watch_progress, seen)

    def _poll_notice_handling(self, pause_s: float) -> None:
        """Look now and then whether a worker has begun to look at notices: then growth need not cost a step."""
        running = self._running
        if running is None or running.gone or running.stopping:
            return
        if self.handles_notices:
            self._tell.handles_notices(running.generation)
            return
        longer_s = min(1.2 * pause_s, NOTICE_POLL_EVERY_S[1])
        self._notice_poll_timer = asyncio.get_running_loop().call_later(
            pause_s, self._poll_notice_handling, longer_s
        )

    def _hang(self, slot: int, step: int) -> Failure:
        summary = (
            f"worker {self._node_id}/{slot} made no progress for {self._hang_timeout_s:g} s "
            f"(--hang-timeout); its last heartbeat was at step {step}; it may have been waiting for "
            "another worker: compare the stacks in the logs of all workers"
        )
        stalled_s = self._hang_timeout_s
        return Failure(FailureKind.HANG, summary[:512], slot=slot, progressed=True, stalled_s=stalled_s)
