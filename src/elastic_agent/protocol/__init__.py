"""The protocol as pure code: records, decisions, ranks. No torch, no threads, no clock.

Other packages import its names from here.
"""

from __future__ import annotations

from .activity import Activity, Event
from .cluster_view import Decision, count, names
from .codec import (
    MAX_PLAN_BYTES,
    MAX_REPORTED_GENERATION,
    RecordError,
    check_follows,
    check_whole,
    decode,
    encode,
)
from .coordinator import FINISHED_BEFORE, Coordinator
from .leases import ANSWERS_PER_LEASE, RENEWALS_PER_LEASE, FirstSent, HeldLease, next_renewal_s
from .node import (
    Action,
    Announce,
    Depart,
    Grace,
    Node,
    Notify,
    Outcome,
    Prepare,
    Rejoin,
    RequestStop,
    StartWorkers,
    StopWorkers,
    misquoted,
)
from .records import (
    NODE_ID_HELD,
    RECORD_VERSION,
    Address,
    Cause,
    Failure,
    FailureKind,
    Fingerprint,
    Growth,
    History,
    Host,
    Lease,
    Member,
    Name,
    Notice,
    Phase,
    Plan,
    Policy,
    Seat,
    Seconds,
    State,
    StopRequest,
    World,
)
from .revisions import RevisionTimes
