"""What is known of the workers of one generation while they run and while they end."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_agent.client._cells import HeartbeatFile
from elastic_agent.protocol import Grace
from elastic_agent.workers.cleanup.generation import Cleanup
from elastic_agent.workers.context import WorkerContext
from elastic_agent.workers.guard import client as guard_events

from .interruptions import Interruptions
from .stalls import StallWatch

@dataclass(frozen=True)
class Graces:
    """Seconds between SIGTERM and SIGKILL."""

    restart_s: float
    drain_s: float
    restart_idle_s: float
    """Before a restart, workers that make no progress for so long are killed earlier."""

    def of(self, grace: Grace) -> float:
        """Return the time for this kind of stop."""
        return {Grace.RESTART: self.restart_s, Grace.DRAIN: self.drain_s, Grace.NONE: 0.0}[grace]

    def idle_s(self, grace: Grace) -> float | None:
        """Return how long workers may make no progress in this kind of stop; None: as long as the grace."""
        return self.restart_idle_s if grace is Grace.RESTART else None


@dataclass
class RunningWorkers:
    """The workers of one generation, from their start until nothing is left of them."""

    context: WorkerContext
    heartbeats: HeartbeatFile
    cleanup: Cleanup
    interruptions: Interruptions
    held: list[guard_events.Exited] = field(default_factory=list)
    """Ends that a signal may have caused which the agent has not received yet."""
    interrupted: bool = False
    """A worker was ended by such a signal."""
    gone: bool = False
    """No process is left; their leftover resources are being removed."""
    stopping: bool = False
    succeeding: bool = False
    fenced: bool = False
    """The lease ended, so that other nodes may have begun the next generation."""
    failed: bool = False
    reported: bool = False
    """A worker's failure was reported."""
    stalls: StallWatch | None = None
    stopped_s: float | None = None
    """When the agent began to stop the workers (CLOCK_BOOTTIME)."""
    notice_sent: set[int] = field(default_factory=set)
    """The slots of the workers to which the notice signal was sent."""
    restarts: bool = False
    """The workers are stopped because one failed, and this node goes on with the next ones."""
    saves_on: signal.Signals | None = None
    """The signal on which the workers may save; None: none was sent, or they are stopped because of a failure."""

    @property
    def generation(self) -> int:
        return self.context.generation

    @property
    def pids(self) -> Mapping[int, int]:
        """The workers' processes by slot; empty until all are started."""
        return self.context.pids()

    @property
    def exited(self) -> Mapping[int, guard_events.Exited]:
        """How workers ended, by slot."""
        return self.context.exits


class ReachedSteps:
    """How far the workers of earlier generations got, on this node."""

    def __init__(self) -> None:
        self._step = self._optimizer_steps = 0

    def take_in(self, workers: RunningWorkers) -> None:
        """Count these workers among the earlier ones; they have ended."""
        cells = workers.heartbeats
        self._step = max(self._step, *(cells.read(slot)[1] for slot in workers.pids), 0)
        self._optimizer_steps = max(self._optimizer_steps, *map(cells.optimizer_steps, workers.pids), 0)

    def is_passed_by(self, workers: RunningWorkers) -> bool:
        """Return whether one of these workers got further, by its steps or by heartbeats without steps.

        A worker that reports neither did if it made more optimizer steps.
        """
        for slot in workers.pids:
            beats, step = workers.heartbeats.read(slot)
            if step > self._step if step else bool(beats):
                return True
            if not step and workers.heartbeats.optimizer_steps(slot) > self._optimizer_steps:
                return True
        return False
