"""What a node's workers are doing, and what changes it: every transition of the node's state machine.

:class:`~.node.Node` decides which event has happened and what follows from it; the activity changes only as
:data:`TRANSITIONS` defines. The diagram in docs/internals.md is made from this table.

Reports on workers follow ``started``: the guard holds them back until all workers were started.
"""

from __future__ import annotations

import enum


class Activity(enum.StrEnum):
    """What the node's workers are doing."""

    IDLE = "idle"
    PREPARING = "preparing"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    GONE = "gone"


class Event(enum.StrEnum):
    """What happens to a node, as far as it matters to its workers."""

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


TRANSITIONS: dict[tuple[Activity, Event], Activity | None] = {
    (Activity.IDLE, Event.FORMING): Activity.IDLE,
    (Activity.IDLE, Event.SEATED): Activity.PREPARING,
    (Activity.IDLE, Event.UNSEATED): None,
    (Activity.IDLE, Event.NOTICE): None,
    (Activity.IDLE, Event.RUN_STOPPED): Activity.IDLE,
    (Activity.IDLE, Event.LEAVE): Activity.GONE,
    (Activity.IDLE, Event.LEASE_LOST): Activity.IDLE,
    (Activity.IDLE, Event.PREPARED): None,
    (Activity.IDLE, Event.PREPARE_FAILED): None,
    (Activity.IDLE, Event.INTERRUPTED): None,
    (Activity.PREPARING, Event.FORMING): Activity.IDLE,
    (Activity.PREPARING, Event.SEATED): None,
    (Activity.PREPARING, Event.UNSEATED): None,
    (Activity.PREPARING, Event.NOTICE): None,
    (Activity.PREPARING, Event.RUN_STOPPED): Activity.IDLE,
    (Activity.PREPARING, Event.LEAVE): Activity.GONE,
    (Activity.PREPARING, Event.LEASE_LOST): Activity.IDLE,
    (Activity.PREPARING, Event.PREPARED): Activity.STARTING,
    (Activity.PREPARING, Event.PREPARE_FAILED): Activity.IDLE,
    (Activity.STARTING, Event.FORMING): Activity.STOPPING,
    (Activity.STARTING, Event.SEATED): None,
    (Activity.STARTING, Event.UNSEATED): Activity.STOPPING,
    (Activity.STARTING, Event.NOTICE): Activity.STARTING,
    (Activity.STARTING, Event.RUN_STOPPED): Activity.STOPPING,
    (Activity.STARTING, Event.LEAVE): Activity.STOPPING,
    (Activity.STARTING, Event.LEASE_LOST): Activity.STOPPING,
    (Activity.STARTING, Event.STARTED): Activity.RUNNING,
    (Activity.STARTING, Event.FAILED): Activity.STOPPING,
    (Activity.RUNNING, Event.FORMING): Activity.STOPPING,
    (Activity.RUNNING, Event.UNSEATED): Activity.STOPPING,
    (Activity.RUNNING, Event.NOTICE): Activity.RUNNING,
    (Activity.RUNNING, Event.RUN_STOPPED): Activity.STOPPING,
    (Activity.RUNNING, Event.LEAVE): Activity.STOPPING,
    (Activity.RUNNING, Event.LEASE_LOST): Activity.STOPPING,
    (Activity.RUNNING, Event.HANDLES_NOTICES): Activity.RUNNING,
    (Activity.RUNNING, Event.INTERRUPTED): Activity.RUNNING,
    (Activity.RUNNING, Event.FAILED): Activity.STOPPING,
    (Activity.RUNNING, Event.SUCCEEDED): Activity.IDLE,
    (Activity.RUNNING, Event.SAVED): Activity.IDLE,
    (Activity.STOPPING, Event.FORMING): None,
    (Activity.STOPPING, Event.SEATED): None,
    (Activity.STOPPING, Event.UNSEATED): None,
    (Activity.STOPPING, Event.NOTICE): None,
    (Activity.STOPPING, Event.RUN_STOPPED): None,
    (Activity.STOPPING, Event.LEAVE): None,
    (Activity.STOPPING, Event.LEASE_LOST): Activity.STOPPING,
    (Activity.STOPPING, Event.STARTED): None,
    (Activity.STOPPING, Event.HANDLES_NOTICES): None,
    (Activity.STOPPING, Event.INTERRUPTED): None,
    (Activity.STOPPING, Event.FAILED): None,
    (Activity.STOPPING, Event.SUCCEEDED): None,
    (Activity.STOPPING, Event.SAVED): None,
    (Activity.STOPPING, Event.STOPPED): Activity.IDLE,
    **{(Activity.GONE, event): None for event in Event},
}
"""The activity after an event; None: the event has no effect (any more). No other pair is expected."""
