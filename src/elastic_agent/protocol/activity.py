"""The activity of a node's workers, and what changes it: every transition of the node's state machine.

:class:`~.node.Node` decides which event has happened and what follows from it; the activity changes only as
:data:`TRANSITIONS` defines. The diagram in docs/internals.md is made from this table.

Reports on workers follow ``started``: the guard holds them back until all workers were started.
"""

from __future__ import annotations

import enum


class Activity(enum.StrEnum):
    """The activity of the node's workers."""

    IDLE = "idle"
    PREPARING = "preparing"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    GONE = "gone"


class Event(enum.StrEnum):
    """Something that happens to a node, as far as it matters to its workers."""

    FORMING = "a generation forms"
    SEATED = "sealed with a seat"
    UNSEATED = "sealed without a seat"
    NOTICE = "notice"
    RUN_STOPPED = "run stopped"
    """This node stays until no worker of any node is left."""
    LEAVE = "leave"
    """Its part is over: it was drained or refused, or the run has ended."""
    LEASE_LOST = "lease lost"
    PREPARED = "prepared"
    PREPARE_FAILED = "prepare failed"
    STARTED = "started"
    HANDLES_NOTICES = "handles notices"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    SUCCEEDED = "succeeded"
    SAVED = "saved"
    STOPPED = "stopped"


_END_THE_START = (
    Event.FORMING,
    Event.UNSEATED,
    Event.RUN_STOPPED,
    Event.LEAVE,
    Event.LEASE_LOST,
    Event.FAILED,
)
"""The events that end workers that are being started, or run."""

TRANSITIONS: dict[tuple[Activity, Event], Activity] = {
    (Activity.IDLE, Event.FORMING): Activity.IDLE,
    (Activity.IDLE, Event.SEATED): Activity.PREPARING,
    (Activity.IDLE, Event.RUN_STOPPED): Activity.IDLE,
    (Activity.IDLE, Event.LEAVE): Activity.GONE,
    (Activity.IDLE, Event.LEASE_LOST): Activity.IDLE,
    (Activity.PREPARING, Event.FORMING): Activity.IDLE,
    (Activity.PREPARING, Event.UNSEATED): Activity.IDLE,
    (Activity.PREPARING, Event.RUN_STOPPED): Activity.IDLE,
    (Activity.PREPARING, Event.LEAVE): Activity.GONE,
    (Activity.PREPARING, Event.LEASE_LOST): Activity.IDLE,
    (Activity.PREPARING, Event.PREPARED): Activity.STARTING,
    (Activity.PREPARING, Event.PREPARE_FAILED): Activity.IDLE,
    **{(Activity.STARTING, event): Activity.STOPPING for event in _END_THE_START},
    (Activity.STARTING, Event.NOTICE): Activity.STARTING,
    (Activity.STARTING, Event.STARTED): Activity.RUNNING,
    **{(Activity.RUNNING, event): Activity.STOPPING for event in _END_THE_START},
    (Activity.RUNNING, Event.NOTICE): Activity.RUNNING,
    (Activity.RUNNING, Event.HANDLES_NOTICES): Activity.RUNNING,
    (Activity.RUNNING, Event.INTERRUPTED): Activity.RUNNING,
    (Activity.RUNNING, Event.SUCCEEDED): Activity.IDLE,
    (Activity.RUNNING, Event.SAVED): Activity.IDLE,
    (Activity.STOPPING, Event.LEASE_LOST): Activity.STOPPING,
    (Activity.STOPPING, Event.STOPPED): Activity.IDLE,
}
"""The activity after an event. Any other event has no effect: it comes too late, or another one is awaited."""

WITH_PARKED: dict[tuple[Activity, Event], Activity] = {
    (activity, event): Activity.STOPPING
    for activity in (Activity.IDLE, Activity.PREPARING)
    for event in (Event.RUN_STOPPED, Event.LEAVE, Event.LEASE_LOST)
}
"""The transitions that differ while workers are parked, or warm up."""
