"""Notices that the workers of this node make no progress: no heartbeat, no optimizer step, and no
collective begun or completed.

It tells that there is a stall, and after which time it counts as a hang. Whether there is one, and which worker is the
cause, only the reports of all nodes show (`diagnosis/hangs.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from elastic_agent.agent import events
from elastic_agent.client._cells import HeartbeatFile
from elastic_agent.workers.guard.client import Exited

from .collectives import Collectives, WorkerCollectives

LOOKS_PER_TIMEOUT = 20
"""The number of checks of progress per hang time-out."""

LOOK_AT_LEAST_EVERY_S = 5.0

HEARTBEAT_TIMEOUT_S = 1800.0
"""The hang time-out of workers with heartbeats if the user has set none."""

SHARE_OF_TIMEOUT = 0.9
"""A collective that has taken this part of its own time-out counts as hung: PyTorch would soon end its worker, and the
error would name neither the worker nor the reason."""

_OWN_LIMIT = f"{SHARE_OF_TIMEOUT * 100:g} % of the time-out of their process group"

TELL_AFTER_S = 8.0
"""A stall is first reported after this time; then again whenever it has become twice as long."""

OVER_AGAIN_S = 10.0
"""The pause between comparisons with the other nodes of a stall that has lasted for the time-out."""

STALLED_LOOK_EVERY_S = 1.0
"""The pause between checks of progress when there was none since the last one: the workers wait anyway."""

ANSWER_S = 1.0
"""The time that workers have to answer in detail where they are."""


@dataclass(frozen=True)
class Progress:
    """The progress of the running workers of this node."""

    generation: int
    pids: Mapping[int, int]
    """By slot; those that have not ended."""
    steps: Mapping[int, int]
    """The last step that each reported by a heartbeat; 0: none."""
    exited: Mapping[int, Exited] = field(default_factory=dict)
    """Those that have ended."""
    collectives: Mapping[int, WorkerCollectives] = field(default_factory=dict)
    """The answers of those that have made a process group."""
    stalled_s: float | None = None
    """For how long none has made progress; None: not long."""
    optimizer_steps: Mapping[int, int] = field(default_factory=dict)
    """The steps that were counted of each since its start; 0: none, or not known."""

    @property
    def reported_step(self) -> int:
        """The highest step that a worker reported; 0: none has."""
        return max(self.steps.values(), default=0)

    @property
    def newest_step(self) -> int:
        """The same, or else the highest count of optimizer steps; 0: none is known."""
        return self.reported_step or max(self.optimizer_steps.values(), default=0)


@dataclass(eq=False, repr=False)
class StallWatch:
    """Watches the workers of one generation."""

    generation: int
    """The workers'."""
    alive: Callable[[], Mapping[int, int]]
    """The processes of the workers that run, by slot."""
    heartbeats: HeartbeatFile
    """Their heartbeats."""
    collectives: Collectives
    """Their answers."""
    limit_s: float | None
    """The time-out; 0: a stall never counts as a hang; None: by the collectives' own time-outs."""
    report: Callable[[events.Event], None]
    """Publishes :class:`~elastic_agent.agent.events.Stalled`."""

    def __post_init__(self) -> None:
        self._beats: dict[int, tuple[int, float]] = {}
        """Of each slot with heartbeats: how many, and since when there are so many."""
        self._position: object = None
        self._since_s = math.inf
        """Since when there was no progress."""
        self._quiet_since_s = 0.0
        """The same, first signs of life of the workers not counted: until they have met, they may wait for each
        other."""
        self._has_progressed = False
        self._tells_first_s = TELL_AFTER_S if not self.limit_s else min(TELL_AFTER_S, self.limit_s / 2)
        self._pause_s = min(LOOK_AT_LEAST_EVERY_S, (self.limit_s or HEARTBEAT_TIMEOUT_S) / LOOKS_PER_TIMEOUT)

    @property
    def stalled_s(self) -> float | None:
        """For how long nothing has progressed; None: not long."""
        stalled_s = asyncio.get_running_loop().time() - self._since_s
        return stalled_s if stalled_s >= self._tells_first_s else None

    async def run(self) -> None:
        """Watch until cancelled."""
        clock = asyncio.get_running_loop().time
        self._since_s = self._quiet_since_s = clock()
        tell_after_s, over_again_s = self._tells_first_s, 0.0
        while True:
            now_s = clock()
            cells = {slot: self.heartbeats.read(slot) for slot in self.alive()}
            silent = self._silent({slot: beats for slot, (beats, _) in cells.items()}, now_s)
            if self._has_moved(cells, now_s):
                over_again_s = 0.0
                if self._has_progressed:
                    tell_after_s = self._tells_first_s
            stalled_s, quiet_s = now_s - self._since_s, now_s - self._quiet_since_s
            is_over = stalled_s >= over_again_s and (silent is not None or stalled_s >= self._limit()[0])
            if is_over or quiet_s >= tell_after_s:
                # A stall that was reported as over and is no hang is reported again after it has lasted for so long.
                over_again_s = stalled_s + OVER_AGAIN_S if is_over else over_again_s
                tell_after_s = 2 * quiet_s if quiet_s >= tell_after_s else tell_after_s
                self.collectives.ask(details=True)
                await asyncio.sleep(min(ANSWER_S, max(0.3, self._pause_s)))
                self._tell(is_over, silent)
            else:
                self.collectives.ask(details=False)
                await asyncio.sleep(
                    self._pause_s if quiet_s == 0 else min(self._pause_s, STALLED_LOOK_EVERY_S)
                )

    def _has_moved(self, cells: Mapping[int, tuple[int, int]], now_s: float) -> bool:
        """Note and return whether there was any progress since the last look."""
        workers = self.collectives.workers
        counts = [self.heartbeats.optimizer_steps(slot) for slot in cells]
        position = [(slot, workers[slot].position) for slot in sorted(workers)], cells, counts
        if position == self._position:
            return False
        self._position, self._since_s = position, now_s
        self._has_progressed |= any(map(any, cells.values())) or any(map(_has_begun, workers.values()))
        if self._has_progressed:
            self._quiet_since_s = now_s
        return True

    def _silent(self, counts: Mapping[int, int], now_s: float) -> int | None:
        """Return a slot whose heartbeats have stopped for the time-out; ``counts``: how many each has sent."""
        limit_s = HEARTBEAT_TIMEOUT_S if self.limit_s is None else self.limit_s
        silent = None
        for slot, beats in counts.items():
            known = self._beats.get(slot)
            if beats and (known is None or known[0] != beats):
                self._beats[slot] = (beats, now_s)
            elif known is not None and 0 < limit_s <= now_s - known[1] and silent is None:
                silent = slot
        return silent

    def _limit(self) -> tuple[float, str]:
        """Return the time-out, of several the one that ends first, and its name."""
        waiting = [worker for worker in self.collectives.workers.values() if is_waiting(worker)]
        own_s = SHARE_OF_TIMEOUT * min(
            (worker.timeout_s for worker in waiting if worker.timeout_s > 0), default=0.0
        )
        if self.limit_s == 0:
            return math.inf, ""
        limits = (own_s, _OWN_LIMIT), (self.limit_s or 0.0, f"--hang-timeout {self.limit_s or 0:g}")
        return min((limit for limit in limits if limit[0] > 0), default=(math.inf, ""))

    def _tell(self, is_over: bool, silent: int | None) -> None:
        stalled_s = asyncio.get_running_loop().time() - self._quiet_since_s
        step = self.heartbeats.read(silent)[1] if silent is not None else 0
        limit_s, limit = self._limit()
        over_at_s = self._since_s + limit_s
        self.report(
            events.Stalled(
                self.generation, stalled_s, is_over, silent, step, over_at_s=over_at_s, limit=limit
            )
        )


def _has_begun(worker: WorkerCollectives) -> bool:
    """Return whether it has called a collective, so that its process group is there."""
    return any(group.enqueued > 0 or group.started > 0 or group.completed > 0 for group in worker.groups)


def is_waiting(worker: WorkerCollectives) -> bool:
    """Return whether the worker waits in a collective, or did when it was last asked."""
    return bool(worker.waits_in) or any(group.is_waiting for group in worker.groups)
