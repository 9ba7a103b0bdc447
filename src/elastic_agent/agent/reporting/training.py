"""Counts for how long the workers of this node trained, and warns of scripts that do not train as they should."""

from __future__ import annotations

import asyncio
from collections.abc import Set

from elastic_agent.agent import events
from elastic_agent.agent.supervisor import Supervisor
from elastic_agent.logs import get_logger
from elastic_agent.monitoring.status import Goodput
from elastic_agent.workers.guard.client import Fenced, GuardLost, Spawned

LOOK_EVERY_S = 1.0
"""The time between readings of the workers' steps, and so the error in the time at which they began to train."""

LEAST_LOST_STEPS, LOST_FACTOR = 10, 10
"""Workers that resume below a tenth of the steps that were reached have found no checkpoint; unless these were few, or
of another training."""


class Training:
    """The training on this node since its agent was started; subscribes to the agent's events.

    Workers train from their first step on until they end, or from their start on if they report no steps.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        """Begin without workers, in the event loop; ``supervisor``: runs them."""
        self._supervisor = supervisor
        self._clock = asyncio.get_running_loop().time
        self._began_s = self._clock()
        self._trained_s = 0.0
        """By workers that have ended."""
        self._since_s: float | None = None
        """Since when the present workers train; None: they do not."""
        self._awaits_step = self._awaits_report = False
        """Workers run, and no step of them is known, or none that they have reported themselves."""
        self.has_steps = False
        """Workers of this node have made steps that were noticed."""
        self._last_step = 0
        """The newest that workers of this agent had reported when it was read, or when they ended."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_told_of_copies = False
        self.has_run = False
        """Workers were started."""

    @property
    def goodput(self) -> Goodput:
        """The use of the time so far."""
        now_s = self._clock()
        trained_s = self._trained_s + (now_s - self._since_s if self._since_s is not None else 0.0)
        return Goodput(trained_s, max(0.0, now_s - self._began_s - trained_s))

    def on_event(self, event: events.Event) -> None:
        """Count what it means for the time of the node."""
        match event:
            case Spawned():
                self.has_run = True
                self._awaits_step = self._awaits_report = True
                self._since_s = None if self.has_steps else self._clock()
                self._look()
            case (
                events.WorkersStopping()
                | events.WorkersCleared()
                | events.WorkersSaved()
                | events.WorkersSucceeded()
                | Fenced()
                | GuardLost()
            ):
                self._ended()
            case events.GenerationEnded(workers=workers):
                self.has_steps |= any(report.step or report.optimizer_steps for report in workers)
                if self._timer is None or self._awaits_report:  # else: of workers before the present ones
                    step = max((report.step or 0 for report in workers), default=0)
                    self._last_step = step or self._last_step

    def close(self) -> None:
        """Read no more steps."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ended(self) -> None:
        """End the training."""
        if self._timer is not None:
            self.close()
            self._compare_step()
        if self._since_s is not None:
            self._trained_s += self._clock() - self._since_s
        self._since_s, self._awaits_step = None, False

    def _look(self) -> None:
        """Read the steps of the workers, and again after a while."""
        progress = self._supervisor.progress
        if progress is not None and progress.newest_step:
            self._begin()
        self._compare_step()
        self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def _begin(self) -> None:
        """Begin the training, if it has not: its workers have made a step."""
        if self._awaits_step:
            self._awaits_step, self.has_steps = False, True
            self._since_s = self._clock()

    def _compare_step(self) -> None:
        """Compare the first step that workers report with the last one of those before, and keep the newest."""
        progress = self._supervisor.progress
        step = progress.reported_step if progress is not None else 0
        if step <= 0:
            return
        self._begin()
        # Not the highest: that may be of an earlier training of the script, such as a fold.
        reached, self._last_step = self._last_step, step
        is_first, self._awaits_report = self._awaits_report, False
        if is_first and reached >= max(LOST_FACTOR * step, LEAST_LOST_STEPS):
            get_logger().warning(
                f"training began again at step {step}, although it had reached step {reached}: unless this is another "
                "training of the script, it found no checkpoint; let it load the newest one at its start, from a "
                "folder that all machines share and whose name is the same every time (no date, as in output folders "
                "of hydra)"
            )

    def warn_of_copies(self, slots: Set[int]) -> None:
        """Warn once that each worker trains a model of its own, if all of this node have made steps without a group.

        ``slots``: the workers that have reported it; none of the others has made a process group.
        """
        world, seat = self._supervisor.world, self._supervisor.seat
        if self._is_told_of_copies or world is None or seat is None:
            return
        if world.world_size == 1 or len(slots) < seat.slots:
            return
        self._is_told_of_copies = True
        get_logger().warning(
            "every worker of this node takes optimizer steps without a process group: unless the script shares "
            "gradients in another way, each worker trains a model of its own. To train one model with all "
            f"{world.world_size} workers, call torch.distributed.init_process_group() or fabric.launch(), or use "
            "Accelerator, or a Trainer with all devices; if that is intended, ignore this"
        )
