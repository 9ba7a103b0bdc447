"""The protocol as pure code: records, decisions, ranks. No torch, no threads, no clock.

Other packages import its names from here.
"""

from __future__ import annotations

from .activity import TRANSITIONS as TRANSITIONS
from .activity import Activity as Activity
from .activity import Event as Event
from .budget import end_reason as end_reason
from .budget import remaining_restarts as remaining_restarts
from .cluster_view import Decision as Decision
from .cluster_view import count as count
from .cluster_view import names as names
from .cluster_view import readmission_delay_s as readmission_delay_s
from .codec import MAX_PLAN_BYTES as MAX_PLAN_BYTES
from .codec import MAX_REPORTED_GENERATION as MAX_REPORTED_GENERATION
from .codec import ForeignVersionError as ForeignVersionError
from .codec import RecordError as RecordError
from .codec import check_follows as check_follows
from .codec import check_whole as check_whole
from .codec import decode as decode
from .codec import encode as encode
from .coordinator import FINISHED_BEFORE as FINISHED_BEFORE
from .coordinator import Coordinator as Coordinator
from .leases import ANSWERS_PER_LEASE as ANSWERS_PER_LEASE
from .leases import RENEWALS_PER_LEASE as RENEWALS_PER_LEASE
from .leases import FirstSent as FirstSent
from .leases import HeldLease as HeldLease
from .leases import next_renewal_s as next_renewal_s
from .node import Action as Action
from .node import Announce as Announce
from .node import Depart as Depart
from .node import Grace as Grace
from .node import Node as Node
from .node import Notify as Notify
from .node import Outcome as Outcome
from .node import Prepare as Prepare
from .node import Rejoin as Rejoin
from .node import RequestStop as RequestStop
from .node import StartWorkers as StartWorkers
from .node import StopWorkers as StopWorkers
from .notices import PROMPT as PROMPT
from .records import RECORD_VERSION as RECORD_VERSION
from .records import Address as Address
from .records import Cause as Cause
from .records import Count as Count
from .records import Failure as Failure
from .records import FailureKind as FailureKind
from .records import Fingerprint as Fingerprint
from .records import Generation as Generation
from .records import Growth as Growth
from .records import History as History
from .records import Host as Host
from .records import Job as Job
from .records import Lease as Lease
from .records import LongText as LongText
from .records import Member as Member
from .records import Name as Name
from .records import Notice as Notice
from .records import Phase as Phase
from .records import Plan as Plan
from .records import Policy as Policy
from .records import Seat as Seat
from .records import Seconds as Seconds
from .records import Signature as Signature
from .records import State as State
from .records import StopRequest as StopRequest
from .records import Text as Text
from .records import World as World
from .revisions import RevisionTimes as RevisionTimes
from .waiting import Waiting as Waiting
