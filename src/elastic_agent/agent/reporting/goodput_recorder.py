"""Keeps the account of what this node spends its time on; a copy on disk is for the next start of the agent."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from elastic_agent.agent import events
from elastic_agent.agent.tasks import BackgroundTasks
from elastic_agent.agent.worker_group.stalls import Progress
from elastic_agent.diagnosis.records import Activity, Goodput
from elastic_agent.files import all_but_newest, write_atomically
from elastic_agent.logs import get_logger
from elastic_agent.monitoring.goodput import Account, SavedGoodput
from elastic_agent.monitoring.status_text import goodput_text
from elastic_agent.protocol import FailureKind, Outcome, Phase, Plan, Waiting
from elastic_agent.rendezvous.disk_thread import DiskThread
from elastic_agent.rendezvous.events import PlanSeen, Registered
from elastic_agent.workers.guard.client import Fenced, GuardLost, Spawned

LOOKS_AT_START_S = (0.1, 1.0)
"""The shortest and longest pause between reading the steps of workers until they report the first one; it grows."""

FIRST_LOOKS_S = 60.0
"""How long so, if the workers report no steps."""

LOOK_EVERY_S = 5.0

SAVE_EVERY_S = 30.0

SAVE_AFTER_S = 1.0
"""How long after workers have ended: the next ones, which may be started meanwhile, come first."""

LOAD_TIMEOUT_S = 5.0
"""How long reading the account of the start before may take; if it takes longer, nothing is saved."""

KEPT_RUNS = 200

IN_ORDER = (Outcome.FINISHED, Outcome.FAILED, Outcome.DRAINED, Outcome.STOPPED)
"""Outcomes after which the node is not down until its agent is started again: it was not to run."""


class GoodputFiles:
    """Where an agent keeps the account of its node: ``STATE_DIR/goodput/RUN/NODE.json``."""

    def __init__(self, state_dir: Path, run_id: str, node_id: str) -> None:
        self._path = state_dir / "goodput" / run_id / f"{node_id}.json"

    def load(self) -> SavedGoodput | None:
        """What was saved last; None if there is nothing, or nothing readable."""
        with contextlib.suppress(FileNotFoundError, ValueError, RecursionError):
            return msgspec.json.decode(self._path.read_bytes(), type=SavedGoodput)
        return None

    def save(self, saved: SavedGoodput) -> None:
        """Replace it, and forget the oldest runs. Raises OSError."""
        folder = self._path.parent
        is_new = not folder.is_dir()
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, msgspec.json.encode(saved))
        if is_new:
            for _, old in all_but_newest(folder.parent.iterdir(), KEPT_RUNS):
                shutil.rmtree(old, ignore_errors=True)


LEAST_LOST_STEPS, LOST_FACTOR = 10, 10
"""Workers that resume below a tenth of the steps that were reached have found no checkpoint; unless these were few, or
of another training."""


class GoodputRecorder:
    """Subscribes to the agent's events and keeps the account of its node."""

    def __init__(self, files: GoodputFiles, progress: Callable[[], Progress | None]) -> None:
        """``progress``: of the present workers; None without any."""
        self._files = files
        self._progress = progress
        self._disk = DiskThread("goodput")
        self._account = Account(time.monotonic())
        self._began_s = time.time()
        self._is_loaded = self._is_registered = False
        self._has_run = False
        """Workers ran, and the account has not been logged since."""
        self._tasks = BackgroundTasks()
        self._incarnation = ""
        self._plan: Plan | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._save_timer: asyncio.TimerHandle | None = None
        self._last_step = 0
        """The newest that any workers of this agent had reported when it was read last."""
        self._started_s = self._saved_s = time.monotonic()
        """When the newest workers were started, and when the account was saved last."""
        self._stalled_since_s: float | None = None
        """Since when they made no progress when they last made none for a while."""
        self._hang_reported = False

    @property
    def goodput(self) -> Goodput:
        """The account so far."""
        return self._account.goodput(time.monotonic())

    # -- events ---------------------------------------------------------------------------------

    def on_event(self, event: events.Event) -> None:
        """Count what it means for the time of the node."""
        match event:
            case events.AgentStarted(incarnation=incarnation):
                self._incarnation = incarnation
                self._tasks.start(self._load())
            case events.Rejoining(incarnation=incarnation):
                self._incarnation = incarnation
            case Registered():
                self._is_registered = True
            case PlanSeen(plan=plan):
                self._plan_seen(plan)
            case Spawned():
                self._has_run = True
                self._stalled_since_s, self._hang_reported = None, False
                self._started_s = time.monotonic()
                self._account.workers_started(self._started_s)
                self._look()
            case events.GenerationEnded(workers=workers):
                self._account.last_step(max((one.step for one in workers), default=0))
            case events.AgentEnded(outcome=outcome):
                self._ended(outcome)
            case _:
                self._workers_event(event)

    def _workers_event(self, event: events.Event) -> None:
        match event:
            case events.Stalled(stalled_s=stalled_s):
                self._stalled_since_s = time.monotonic() - stalled_s
            case events.WorkersFailed(failure=failure):
                self._hang_reported = failure.kind is FailureKind.HANG
            case events.WorkersStopping() | Fenced():
                self._workers_ended(Activity.STOPPING, saved=False)
            case GuardLost():
                self._workers_ended(Activity.FORMING, saved=False)
            case events.WorkersCleared():
                self._workers_ended(Activity.FORMING, saved=False)
            case events.WorkersSaved():
                self._workers_ended(Activity.FORMING, saved=True)
            case events.WorkersSucceeded(trained=trained):
                self._workers_ended(Activity.WAITING, saved=True)
                if not trained and self._account.did_not_train():
                    get_logger().warning(
                        "no worker of this node formed a process group or made an optimizer step; if the script "
                        "should train, check that it calls its main function"
                    )

    def _plan_seen(self, plan: Plan) -> None:
        before, self._plan = self._plan, plan
        is_new = before is None or (before.phase, before.generation) != (plan.phase, plan.generation)
        if plan.is_terminal:
            self._log()
        if not is_new or self._timer is not None:  # while workers run, what becomes of them counts
            return
        if plan.phase is Phase.FORMING:
            self._account.switch(Activity.FORMING, time.monotonic())
        elif plan.phase is Phase.RUNNING and plan.world is not None:
            takes_part = plan.world.seat_of(self._incarnation) is not None
            self._account.switch(Activity.STARTING if takes_part else Activity.WAITING, time.monotonic())

    def status_read(self, waiting: Waiting) -> None:
        """The coordinator has said what it waits for."""
        is_forming = self._plan is not None and self._plan.phase is Phase.FORMING
        if is_forming and self._timer is None:
            if waiting.lacks_nodes:
                self._account.misses_nodes(time.monotonic())
            elif waiting.reason:
                self._account.switch(Activity.FORMING, time.monotonic())

    # -- workers --------------------------------------------------------------------------------

    def _look(self) -> None:
        """Read the steps of the workers, and again after a while."""
        now_s = time.monotonic()
        self._read_step(now_s)
        if now_s - self._saved_s >= SAVE_EVERY_S:
            self._save()
        since_s, (shortest_s, longest_s) = now_s - self._started_s, LOOKS_AT_START_S
        is_early = self._account.awaits_step and since_s < FIRST_LOOKS_S
        pause_s = min(max(shortest_s, since_s / 10), longest_s) if is_early else LOOK_EVERY_S
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._look)

    def _read_step(self, now_s: float) -> None:
        progress = self._progress()
        if progress is None:
            return
        step = max(progress.steps.values(), default=0)
        # Not the highest: that may be of an earlier training of the script, such as a fold.
        reached, was_awaited = self._last_step or self._account.reached, self._account.awaits_step
        self._account.step(step, now_s)
        self._last_step = step or self._last_step
        if (
            was_awaited
            and not self._account.awaits_step
            and reached >= max(LOST_FACTOR * step, LEAST_LOST_STEPS)
        ):
            get_logger().warning(
                f"training began again at step {step}, although it had reached step {reached}: unless this is another "
                "training of the script, it found no checkpoint; let it load the newest one at its start, from a "
                "folder that all machines share and whose name is the same every time (no date, as in output folders "
                "of hydra)"
            )

    def _workers_ended(self, activity: Activity, *, saved: bool) -> None:
        now_s = time.monotonic()
        if self._timer is not None:
            self._stop_timer()
            self._read_step(now_s)
        if activity is Activity.FORMING and self._plan is not None and self._plan.is_terminal:
            activity = Activity.WAITING
        hung_since_s = self._stalled_since_s if self._hung else None
        self._account.workers_ended(activity, now_s, saved=saved, stalled_since_s=hung_since_s)
        self._cancel_save()
        self._save_timer = asyncio.get_running_loop().call_later(SAVE_AFTER_S, self._save)

    @property
    def _hung(self) -> bool:
        """This node or another one has reported that the workers hang."""
        failure = self._plan.failure if self._plan is not None else None
        return self._hang_reported or (failure is not None and failure.kind is FailureKind.HANG)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- the state directory --------------------------------------------------------------------

    async def _load(self) -> None:
        try:
            before = await self._disk.call_async("load", self._files.load, LOAD_TIMEOUT_S)
        except OSError:
            return  # what is there must not be replaced by less
        if before is not None and before.outcome != Outcome.FINISHED:
            self._account.take_over(before, self._began_s)
        self._is_loaded = True

    def _save(self, outcome: str = "") -> None:
        """Save it soon; where that is not possible, the next start of the agent counts from the last time it was."""
        self._saved_s = time.monotonic()
        if self._is_loaded and self._is_registered:
            saved = self._account.saved(self._saved_s, time.time(), outcome)
            self._disk.submit("save", lambda: self._files.save(saved)).add_done_callback(
                lambda done: done.exception()
            )

    def _cancel_save(self) -> None:
        if self._save_timer is not None:
            self._save_timer.cancel()

    def _ended(self, outcome: Outcome) -> None:
        self._stop_timer()
        self._cancel_save()
        self._save(outcome.value if outcome in IN_ORDER else "")
        self._log()

    def _log(self) -> None:
        """Log the account once, and before the lines about the end of the run, which say why it ended."""
        if self._has_run:
            self._has_run = False
            get_logger().info(goodput_text(self.goodput))

    async def saved(self, timeout_s: float) -> None:
        """Wait until the account is saved after the end; not for longer than this."""
        self._tasks.cancel()
        with contextlib.suppress(OSError):
            await self._disk.call_async("saved", lambda: None, timeout_s)
