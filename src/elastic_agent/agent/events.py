"""The events on a node, one type each, and their delivery to the reporters that show or record them.

The events of the session with the store and of the guard, and the node's announcements and departure, are passed on
unchanged; the types defined here are for everything else.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping
from typing import TypeAlias

from msgspec import Struct

from elastic_agent.diagnosis.records import WorkerReport
from elastic_agent.logs import get_logger
from elastic_agent.protocol import Announce, Cause, Depart, Failure, Grace, Notice, Outcome
from elastic_agent.rendezvous.events import SessionEvent
from elastic_agent.workers.guard.client import GuardEvent


class AgentEvent(Struct, frozen=True):
    """An event that is defined here."""


# -- the agent ----------------------------------------------------------------------------------


class RunAgreed(AgentEvent, frozen=True):
    """The store answers, and the run at its endpoint has this id."""

    run_id: str


class AgentStarted(AgentEvent, frozen=True):
    """The node begins to take part in the run, under a node id."""

    incarnation: str
    pid: int
    slots: int


class Rejoining(AgentEvent, frozen=True):
    """The node lost its lease and registers again, under a new incarnation."""

    incarnation: str
    reason: str


class AgentEnded(AgentEvent, frozen=True):
    """The node's part in the run is over."""

    outcome: Outcome
    reason: str


class NotStarted(AgentEvent, frozen=True):
    """The node takes no part in a run: the store did not answer, the node id is in use, or the run has finished."""

    reason: str


class Hosting(AgentEvent, frozen=True):
    """The node's part is over, but these runs still need the store that it hosts; none: it is free to exit."""

    runs: tuple[str, ...]
    nodes: tuple[str, ...] = ()
    """Those that cannot go on without it."""


class Requeued(AgentEvent, frozen=True):
    """The result of the attempt to return the Slurm job to the queue."""

    failed: bool
    words: str


# -- requests -----------------------------------------------------------------------------------


class LeaveSignalled(AgentEvent, frozen=True):
    """A signal makes this node leave the run."""

    reason: str


class DrainRequested(AgentEvent, frozen=True):
    """A node is to leave the run. None: this one."""

    node: str | None
    reason: str


class StopRequested(AgentEvent, frozen=True):
    """The run is to end; workers have ``left_s`` seconds to save."""

    cause: Cause
    left_s: float
    reason: str


class Notified(Struct, frozen=True):
    """Facts about the workers of this node when they get a notice."""

    is_delivered: bool
    """Workers run here."""
    told: int | None = None
    """The number of those that handle notices, or the notice signal; None: not known, as they are being started or
    have exited."""
    stop: signal.Signals = signal.SIGTERM
    """The signal by which they are stopped if this node leaves; if it stays, they get SIGTERM."""
    catching: int = 0
    """The number of those that handle it. Python handles SIGINT in each: it raises KeyboardInterrupt."""


class NoticeGiven(AgentEvent, frozen=True):
    """The workers are to save and exit."""

    generation: int
    notice: Notice
    workers: Notified


# -- workers ------------------------------------------------------------------------------------


class NoticesHandled(AgentEvent, frozen=True):
    """A worker of this generation handles notices."""

    generation: int


class WorkersInterrupted(AgentEvent, frozen=True):
    """A worker was ended by a signal that makes this node stop as well: neither a failure nor a success."""

    generation: int
    failure: Failure


class WorkersFailed(AgentEvent, frozen=True):
    """A worker of this generation failed, hung or could not be started; the first failure only."""

    generation: int
    failure: Failure


class Stalled(AgentEvent, frozen=True):
    """The workers of this node have made no progress for some time."""

    generation: int
    stalled_s: float
    is_over: bool
    """It has lasted for the hang time-out: if a worker waits for another one, the workers hang."""
    silent_slot: int | None = None
    """The worker whose heartbeats have stopped for so long; None: none has."""
    step: int = 0
    """Of its last heartbeat."""
    over_at_s: float = math.inf
    """When it will have lasted for the hang time-out, by the clock of the loop; infinite: there is none."""
    limit: str = ""
    """That time-out, in words."""


class WorkersStopping(AgentEvent, frozen=True):
    """The workers are sent SIGTERM, and SIGKILL after the grace."""

    generation: int
    reason: str
    grace: Grace


class GenerationEnded(AgentEvent, frozen=True):
    """The ends of all workers of this node in a generation; comes some time after the last of them."""

    generation: int
    workers: tuple[WorkerReport, ...]
    """Ranks are counted from that of the node's first worker."""
    facts: Mapping[str, str] = {}
    """Observations of the machine, if a worker failed; see :mod:`elastic_agent.workers.facts`."""
    shown: frozenset[int] = frozenset()
    """Slots of the workers that wrote to the agent's own standard error."""


class WorkersSucceeded(AgentEvent, frozen=True):
    """Every worker exited with 0, and nothing of theirs is left but ``unkillable`` processes."""

    generation: int
    unkillable: tuple[int, ...] = ()


class WorkersSaved(AgentEvent, frozen=True):
    """Every worker has saved and left, or was interrupted; nothing is left but ``unkillable`` processes."""

    generation: int
    unkillable: tuple[int, ...] = ()


class WorkersCleared(AgentEvent, frozen=True):
    """The workers that were to be stopped are gone, and what they left; or only ``unkillable`` processes are left."""

    unkillable: tuple[int, ...] = ()
    parked: int = 0
    """So many workers are not gone but parked, as was allowed."""


class WarmedUp(AgentEvent, frozen=True):
    """The start of workers apart from any world is over."""

    again: bool
    """Missing workers may be started so again."""


Event: TypeAlias = SessionEvent | GuardEvent | Announce | Depart | AgentEvent
Subscriber: TypeAlias = Callable[[Event], None]


class Publisher:
    """Hands each event to all subscribers, in the order in which they subscribed."""

    def __init__(self, *subscribers: Subscriber) -> None:
        self._subscribers = [*subscribers]
        self._reported: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> None:
        """Hand it every event from now on; its first exception is logged, and none affects other subscribers."""
        self._subscribers.append(subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Hand it no more events."""
        self._subscribers.remove(subscriber)

    def __call__(self, event: Event) -> None:
        """Publish an event."""
        for subscriber in self._subscribers:
            try:
                subscriber(event)
            except Exception:
                if subscriber not in self._reported:
                    self._reported.append(subscriber)
                    get_logger().exception(
                        f"internal error in a report of {type(event).__name__}; the run continues, and "
                        "further errors of this reporter are not logged"
                    )
