"""Keeps the account of how long the workers of this node trained."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from elastic_agent.agent import events
from elastic_agent.agent.worker_group.stalls import Progress
from elastic_agent.logs import get_logger
from elastic_agent.monitoring.goodput import Account, Goodput
from elastic_agent.monitoring.status_text import goodput_text
from elastic_agent.rendezvous.events import PlanSeen
from elastic_agent.workers.guard.client import Fenced, GuardLost, Spawned

LOOK_EVERY_S = 1.0
"""How often the steps of workers are read, and so how exactly it is known when they began to train."""

LEAST_LOST_STEPS, LOST_FACTOR = 10, 10
"""Workers that resume below a tenth of the steps that were reached have found no checkpoint; unless these were few, or
of another training."""


class GoodputRecorder:
    """Subscribes to the agent's events and keeps the account of its node."""

    def __init__(self, progress: Callable[[], Progress | None]) -> None:
        """Begin without workers; ``progress``: of the present workers; None without any."""
        self._progress = progress
        self._account = Account(time.monotonic())
        self._has_run = False
        """Workers ran, and the account has not been logged since."""
        self._timer: asyncio.TimerHandle | None = None
        self._awaits_report = False
        """Workers run, and none has reported a step."""
        self._last_step = 0
        """The newest that the last workers of this agent had reported when it was read, or when they ended."""

    @property
    def goodput(self) -> Goodput:
        """The account so far."""
        return self._account.goodput(time.monotonic())

    def on_event(self, event: events.Event) -> None:
        """Count what it means for the time of the node."""
        match event:
            case PlanSeen(plan=plan):
                if plan.is_terminal:
                    self._log()
            case Spawned():
                self._has_run = True
                self._account.workers_started(time.monotonic())
                self._awaits_report = True
                self._look()
            case (
                events.WorkersStopping()
                | events.WorkersCleared()
                | events.WorkersSaved()
                | Fenced()
                | GuardLost()
            ):
                self._workers_ended()
            case events.GenerationEnded(workers=workers):
                if self._timer is None or self._awaits_report:  # else: of workers before the present ones
                    self._last_step = (
                        max((end.report.step or 0 for end in workers), default=0) or self._last_step
                    )
            case events.WorkersSucceeded(trained=trained):
                self._workers_ended(trained=trained)
                if not trained and not self.goodput.training_s:
                    get_logger().warning(
                        "no worker of this node formed a process group or made an optimizer step; if the script "
                        "should train, check that it calls its main function"
                    )

    def close(self) -> None:
        """Read no more steps, and log the account if that is not done yet."""
        self._stop_timer()
        self._log()

    # -- workers --------------------------------------------------------------------------------

    def _look(self) -> None:
        """Read the steps of the workers, and again after a while."""
        now_s, progress = time.monotonic(), self._progress()
        if progress is not None and progress.newest_step:
            self._account.step(now_s)
        self._read_step(now_s)
        self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def _read_step(self, now_s: float) -> None:
        progress = self._progress()
        step = max(progress.steps.values(), default=0) if progress is not None else 0
        if step <= 0:
            return
        # Not the highest: that may be of an earlier training of the script, such as a fold.
        reached, is_first = self._last_step, self._awaits_report
        self._awaits_report = False
        self._account.step(now_s)
        self._last_step = step
        if is_first and reached >= max(LOST_FACTOR * step, LEAST_LOST_STEPS):
            get_logger().warning(
                f"training began again at step {step}, although it had reached step {reached}: unless this is another "
                "training of the script, it found no checkpoint; let it load the newest one at its start, from a "
                "folder that all machines share and whose name is the same every time (no date, as in output folders "
                "of hydra)"
            )

    def _workers_ended(self, *, trained: bool = True) -> None:
        now_s = time.monotonic()
        if self._timer is not None:
            self._stop_timer()
            self._read_step(now_s)
        self._account.workers_ended(now_s, trained=trained)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _log(self) -> None:
        """Log the account once, and before the lines about the end of the run, which say why it ended."""
        if self._has_run:
            self._has_run = False
            get_logger().info(goodput_text(self.goodput))
