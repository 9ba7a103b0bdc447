"""Signals to the agent: this node leaves, the whole run saves and ends, or the agent exits at once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from elastic_agent.agent.events import LeaveSignalled
from elastic_agent.agent.slurm.job import SlurmJob
from elastic_agent.agent.worker_group.interruptions import StopSignals
from elastic_agent.config.settings import Settings
from elastic_agent.diagnosis.known_errors import signal_name
from elastic_agent.logs import get_logger
from elastic_agent.protocol import Cause, Plan, names

from .supervisor import Supervisor
from .tasks import BackgroundTasks

_AGAIN = "the same command is started here again"

FIRST_ONE_S = 2.0
"""The time in which the first agent of a Slurm step is to publish the meaning of a signal."""


def _is_ending(plan: Plan | None) -> bool:
    return plan is not None and plan.notice is not None and plan.notice.ends


class EndedAtOnceError(Exception):
    """A second signal: the agent exits at once."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"terminated by {signal_name(-signum)}")
        self.signum = signum


@dataclass(eq=False, repr=False)
class SignalDesk:
    """Receives the agent's signals from :meth:`open` on, and passes them to the supervisor, as soon as there is one."""

    settings: Settings
    """They say which signal means what."""
    job: SlurmJob | None
    """The Slurm job that this agent is a task of, if it is."""
    stop_signals: StopSignals
    """Those that are handled here, and those that have come, among them a notice before :meth:`open`."""
    _: KW_ONLY
    publish: Callable[[LeaveSignalled], None]
    """Called when a signal makes this agent leave."""
    depending: Callable[[], Sequence[str]] = tuple
    """Gives the nodes that cannot go on without the store of this process."""

    def __post_init__(self) -> None:
        self.leave_signals: list[int] = []
        """Signals to leave that have come."""
        self.hosting_on = False
        """The agent's own part is over; it only serves the store to others."""
        self._main: asyncio.Task[Any] | None = None
        """Cancelled when there is nothing to shut down gracefully, or no time for it."""
        self._supervisor: Supervisor | None = None
        self._notice = ""
        """The request to end the run, once there is one."""
        self._tasks = BackgroundTasks()
        self._log = get_logger()

    def open(self) -> None:
        """Handle signals from now on, in the running loop; a second signal to leave cancels the present task."""
        loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        notice = self.settings.notice_signum
        wanted = {signal.Signals[name]: self._leave_signalled for name in self.settings.signals_to_handle}
        if notice is not None:
            wanted[notice] = self._notice_signalled
        for signum, act in wanted.items():
            with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: the caller's business
                loop.add_signal_handler(signum, act, signum)
                self.stop_signals.handled.add(signum)
        if notice is not None and self.stop_signals.received([notice]):
            self._notice_signalled(notice)  # it came before

    def close(self) -> None:
        """Take no more signals: a loop that is closed first closes the descriptor that they are written to."""
        with contextlib.suppress(ValueError):  # not the main thread
            signal.set_wakeup_fd(-1)

    def attend(self, supervisor: Supervisor) -> None:
        """Pass signals to this supervisor, including those received before there was one."""
        self._supervisor = supervisor
        if self.leave_signals:  # it came while another id was being looked for
            supervisor.drain(f"{signal_name(-self.leave_signals[0])} received")
        elif self._notice:
            self._give_notice(supervisor)

    # -- this node leaves -----------------------------------------------------------------------

    def _leave_signalled(self, signum: int) -> None:
        self.stop_signals.receive(signum)
        self.leave_signals.append(int(signum))
        received = f"{signal_name(-signum)} received"
        self.publish(LeaveSignalled(received))
        depending = names(self.depending())
        if self._supervisor is None or len(self.leave_signals) > 1:
            follows = f"; this machine hosted the store: {depending} cannot go on until {_AGAIN}"
            self._log.warning(f"{received}: exiting immediately{follows if depending else ''}")
            if self._main is not None:
                self._main.cancel()
        elif self.hosting_on:
            who = depending or "other nodes"
            self._log.info(
                f"{received} while {who} need the store here; send a second signal to exit immediately"
            )
        elif self.job is not None and signum == signal.SIGTERM:
            self._tasks.start(self._ask_slurm(self._supervisor, self.job, signum))
        else:
            self._leave(self._supervisor, received)

    def _leave(self, supervisor: Supervisor, received: str) -> None:
        depending = names(self.depending())
        stays = f", and its agent stays to serve the store to {depending}" if depending else ""
        follows = f" (they cannot go on then until {_AGAIN})" if depending else ""
        self._log.info(
            f"{received}: this node is leaving the run{stays}; send a second signal to exit immediately{follows}"
        )
        supervisor.drain(received)

    def _begin_notice(self, signum: int) -> None:
        self._log.info(f"{signal_name(-signum)} received: stopping the run; its workers get a notice to save")
        where = self._supervisor.node_id if self._supervisor is not None else "a node"
        self._notice = f"{signal_name(-signum)} on {where}"

    def _notice_signalled(self, signum: int) -> None:
        self.stop_signals.receive(signum)
        self._begin_notice(signum)
        if self._supervisor is not None:
            self._give_notice(self._supervisor)

    def _give_notice(self, supervisor: Supervisor) -> None:
        if self.job is None:
            supervisor.stop(Cause.PREEMPTED, self.settings.notice_time, self._notice)
        else:
            self._tasks.start(self._ask_slurm(supervisor, self.job))

    async def _ask_slurm(self, supervisor: Supervisor, job: SlurmJob, signum: int | None = None) -> None:
        """Give the notice with the reason and the deadline that Slurm's controller names.

        ``signum``: SIGTERM, which comes from scancel, or from a preemption of the job (if it has no --signal): this
        node leaves unless the job is preempted.
        """
        plan = supervisor.node.plan
        if not job.first and not _is_ending(plan):  # a large job queries Slurm's controller once
            with contextlib.suppress(TimeoutError):
                plan = await asyncio.wait_for(supervisor.plan_with(_is_ending), FIRST_ONE_S)
        if _is_ending(plan):
            return  # another agent of the job has asked
        end = await job.end()
        if signum is not None and not end.preempted:
            self._leave(supervisor, f"{signal_name(-signum)} received")
            return
        if signum is not None:
            self._begin_notice(signum)
        if end.unknown_because:
            self._log.warning("cannot determine when the job ends", reason=end.unknown_because)
        cause = Cause.PREEMPTED if end.preempted else Cause.WALLTIME
        supervisor.stop(cause, end.time_to_save_s(self.settings.notice_time), self._notice)
