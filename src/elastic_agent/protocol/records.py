"""The records that the nodes and the coordinator exchange, typed and bounded.

Each node writes its own :class:`Member` and :class:`Lease`; only the coordinator writes the
:class:`Plan`. How they become bytes and which bytes are accepted: :mod:`.codec`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from elastic_agent.values import (
    LONGEST_LEASE_S,
    LONGEST_TIME_S,
    MOST_NODES,
    MOST_SLOTS,
    NAME_PATTERN,
    SHORTEST_LEASE_S,
    largest_world,
    smallest_world,
)

RECORD_VERSION = 8
"""Version of the record formats; a record of another version is rejected by name. As unknown fields are rejected, it
changes with every field (a test says so)."""

Name = Annotated[str, Meta(pattern=rf"\A{NAME_PATTERN}\Z")]
LONGEST_TEXT = 512
Text = Annotated[str, Meta(max_length=LONGEST_TEXT)]
LongText = Annotated[str, Meta(max_length=4096)]
Host = Annotated[str, Meta(min_length=1, max_length=255)]
Port = Annotated[int, Meta(ge=1, le=65535)]
MAX_GENERATION = 2**53
Generation = Annotated[int, Meta(ge=0, le=MAX_GENERATION)]
Version = Annotated[int, Meta(ge=1, le=2**53)]
MAX_COUNT = 2**31
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Nodes = Annotated[int, Meta(ge=1, le=MOST_NODES)]
Slots = Annotated[int, Meta(ge=1, le=MOST_SLOTS)]
Seconds = Annotated[float, Meta(ge=0, le=LONGEST_TIME_S)]
LeaseSeconds = Annotated[float, Meta(ge=SHORTEST_LEASE_S, le=LONGEST_LEASE_S)]
Signature = Annotated[str, Meta(max_length=64, pattern=r"\A[0-9a-f]*\Z")]


class Record(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A record that is written into the store: immutable, without defaults, and without room for unknown fields."""


class State(enum.StrEnum):
    """The state of a node, always together with a generation g."""

    READY = "ready"
    """The node's workers of every generation below g are stopped or parked; it can run g, unless it warms up."""
    RUNNING = "running"
    FAILED = "failed"
    SUCCEEDED = "succeeded"
    SAVED = "saved"
    """After a notice the node's workers saved and exited; none of g runs any more."""
    LEAVING = "leaving"
    """The node's workers are being stopped and it will not return."""
    STOPPED = "stopped"
    """The run was stopped, and so are the node's workers of g; it stays only until those of all nodes are."""
    LEFT = "left"
    """The node's workers are stopped (or stuck in the kernel for good) and it will not return."""


class FailureKind(enum.StrEnum):
    """Why a node's part of a generation failed."""

    WORKER = "worker"
    """A worker exited with an error or was killed by a signal."""
    HANG = "hang"
    """A worker stopped making progress."""
    START = "start"
    """The workers could not be started at all; no user code ran."""
    BOOTSTRAP = "bootstrap"
    """The generation's bootstrap store could not be reached; no user code ran."""
    INTERRUPTED = "interrupted"
    """Workers were ended by a signal that their agent received too, which publishes what the signal means. Not a
    failure of theirs: it goes with the states RUNNING and SAVED."""
    TOO_FEW = "too-few"
    """The outcome of a run for which not enough nodes came in time."""


class Phase(enum.StrEnum):
    """Where the run stands."""

    FORMING = "forming"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    """It was stopped on request; when it is started again, it resumes above this generation."""

    @property
    def is_terminal(self) -> bool:
        """Return whether the run is over."""
        return self in (Phase.FINISHED, Phase.FAILED, Phase.STOPPED)


class Cause(enum.StrEnum):
    """Why workers get a notice that they will be stopped."""

    PREEMPTED = "preempted"
    WALLTIME = "walltime"
    DRAIN = "drain"
    GROW = "grow"
    OPERATOR = "operator"


class Growth(enum.StrEnum):
    """When nodes that come late are let into a running world."""

    NEVER = "never"
    """Only when it re-forms for another reason."""
    AT_NOTICE = "at-notice"
    """When its training handles notices, and so loses no step."""
    AFTER = "after"
    """Also by a plain restart, some time after the last one came."""


class Failure(Record, frozen=True):
    """The first failure of a node in a generation, in words a person can use."""

    kind: FailureKind
    summary: Text
    tail: LongText = ""
    """The end of what the worker wrote about it, if known."""
    slot: Count | None = None
    returncode: int | None = None
    unreachable_node: Name | None = None
    """For a bootstrap failure: the node whose bootstrap store could not be reached."""
    signature: Signature = ""
    """The same for the same error at the same place in the script. Empty if the error is not known well enough, or if
    another attempt may well cure it."""
    progressed: bool = False
    """A worker of the node had got further than in earlier generations; see :mod:`.budget`."""
    stalled_s: Seconds = 0.0
    """For a hang: how long the worker had made no progress when it was noticed."""
    error: Text = ""
    """The error that the worker raised, in one line; empty if none is known."""
    culprit: Name | None = None
    """For a hang: the node of the worker that the others wait for, which need not be the node that reports it."""
    culprit_slot: Count | None = None
    is_certain: bool = True
    """For a hang: the worker that it is attributed to is known to be the cause."""
    detail: Text = ""
    """The text that follows the summary where there is room: for a hang, the worker that the others wait for."""

    @property
    def words(self) -> str:
        """The summary and the detail."""
        return f"{self.summary}: {self.detail}" if self.detail else self.summary


class Address(Struct, frozen=True, array_like=True):
    """A host and port that can be dialled."""

    host: Host
    port: Port

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class StopRequest(Record, frozen=True):
    """A node's request to the coordinator: that a node leaves, or that the whole run ends."""

    serial: Annotated[int, Meta(ge=1, le=MAX_COUNT)]
    """Grows with every request of this incarnation."""
    cause: Cause
    left_s: Seconds
    """The time that workers have until they are stopped."""
    words: Text
    """The origin of the request, in words."""
    leaver: Name | None = None
    """The node that is to leave; None: the run is to end everywhere."""
    life: Generation = 0
    """The life of the run that it was made in (see :attr:`Plan.life`)."""


class Notice(Record, frozen=True):
    """The notice to every worker of the running world: save, and exit by then."""

    serial: Version
    """The version of the plan that it came with."""
    cause: Cause
    left_s: Seconds
    """The time that workers had when it was published."""
    words: Text
    ends: bool = False
    """The run ends when all workers have exited; otherwise the next generation is formed."""


class Job(Record, frozen=True):
    """The job that a run was started for. With the run's id, it tells a run from an earlier one of the same id."""

    commands: Annotated[tuple[Text, ...], Meta(max_length=MOST_NODES)] = ()
    """Digests of the script and its arguments: a node has one, a world those of its nodes; empty if unknown."""
    scheduled: Text = ""
    """Id of the job in the scheduler; empty outside of one."""
    requeues: Count = 0
    """The number of times that the scheduler started that job again before."""

    def including(self, others: Iterable[Job]) -> Job:
        """Return this job with the commands of these, too. Arguments may differ between nodes."""
        commands = {*self.commands, *(command for other in others for command in other.commands)}
        return msgspec.structs.replace(self, commands=tuple(sorted(commands)[:MOST_NODES]))

    def has_same_command(self, earlier: Job) -> bool:
        """Return whether nodes of the earlier job had the commands of this one."""
        return {*self.commands} <= {*earlier.commands}

    def goes_on(self, earlier: Job) -> bool:
        """Return whether this is the same command in a later life of the same job."""
        return self.is_later_life_of(earlier) and self.has_same_command(earlier)

    def is_later_life_of(self, earlier: Job) -> bool:
        """Return whether the scheduler has started the earlier job again since, as this one."""
        return self.scheduled == earlier.scheduled != "" and self.requeues > earlier.requeues

    def continues(self, history: Plan) -> bool:
        """Return whether users take a run of this job for the one in the history: not if that finished, or was another
        job's and failed."""
        differs = history.phase is Phase.FAILED and self.difference(history.policy.job) != ""
        return history.phase is not Phase.FINISHED and not differs

    def difference(self, earlier: Job) -> str:
        """Say how an earlier job differs from this one, for the log; empty if it does not or that is not known."""
        if earlier.commands and not self.has_same_command(earlier):
            return " with another command"
        if earlier.scheduled and self.scheduled != earlier.scheduled:
            return f" in job {earlier.scheduled}"
        return ""


class Policy(Record, frozen=True):
    """The run's rules. The first member's are taken for the run; times are seconds."""

    min_nodes: Nodes = 1
    max_nodes: Nodes = 1
    max_restarts: Count = 3
    lease_ttl_s: LeaseSeconds = 5.0
    fence_margin_s: Seconds = 1.0
    settle_s: Seconds = 1.0
    join_timeout_s: Seconds = 600.0
    start_timeout_s: Seconds = 30.0
    grow: Growth = Growth.AFTER
    notice_s: Seconds = 60.0
    """The time that workers have to save before a growing world is replaced by the next one."""
    node_counts: Annotated[tuple[Nodes, ...], Meta(max_length=1024)] = ()
    """The sizes that a world may have: multiples of the one number of nodes given, or one of several. Empty: any."""
    finishes_once: bool = False
    """A run that has finished is not started again under its name with the same command."""
    restart_window_s: Seconds = 3600.0
    """For each so long that training makes progress, one charged failure is forgiven; 0: none ever is."""
    job: Job = Job()

    @property
    def join_wait_s(self) -> float:
        """Return how long a run that has had a world waits for further nodes, in seconds: at most for a lease.

        A long ``settle_s`` brings all machines into the first world; it must not keep out a machine that comes back.
        """
        return min(self.settle_s, self.lease_ttl_s)

    def skips(self, history: Plan) -> bool:
        """Return whether the run has finished and is not to be run again.

        Only for the command that has finished: an agent never reports success for a command that no agent ran.
        """
        if history.phase is not Phase.FINISHED:
            return False
        is_same = self.job.has_same_command(history.policy.job)
        return self.job.goes_on(history.policy.job) or (self.finishes_once and is_same)

    def covering(self, history: Plan) -> Policy:
        """Return these rules with a lease and a margin that suffice for nodes that may run what is remembered."""
        if history.settled:
            return self
        return msgspec.structs.replace(
            self,
            lease_ttl_s=max(self.lease_ttl_s, history.policy.lease_ttl_s),
            fence_margin_s=max(self.fence_margin_s, history.policy.fence_margin_s),
        )

    def fit(self, nodes: int) -> int:
        """Return the largest world allowed of so many nodes; 0 if there is none."""
        return largest_world(nodes, self.min_nodes, self.max_nodes, self.node_counts)

    def least_fit(self, above: int) -> int:
        """Return the smallest world allowed of more nodes than these; the largest number of nodes if there is none."""
        found = smallest_world(above, self.min_nodes, self.max_nodes, self.node_counts)
        return found if found is not None else self.max_nodes


class Fingerprint(Record, frozen=True):
    """The versions of script and software on a node; every agent warns of nodes that differ."""

    script: Text = ""
    python: Text = ""
    torch: Text = ""
    package: Text = ""
    script_name: Text = ""


class Seat(Struct, frozen=True, array_like=True):
    """One node's entry in a world: its workers have ranks first_rank .. first_rank + slots - 1."""

    node_id: Name
    incarnation: Name
    address: Host
    slots: Slots
    first_rank: Count
    role: Text = "default"


class World(Struct, frozen=True, forbid_unknown_fields=True):
    """The participants of one generation, in order of group rank; frozen."""

    generation: Generation
    seats: tuple[Seat, ...]
    bootstrap: Address
    """Where the workers of this generation meet: a fresh store, never used before."""
    bootstrap_node: Name

    @property
    def world_size(self) -> int:
        """Number of workers, over all nodes."""
        return sum(seat.slots for seat in self.seats)

    def node_rank(self, incarnation: str) -> int | None:
        """Return the group rank of this incarnation's node, or None if it has no seat."""
        for index, seat in enumerate(self.seats):
            if seat.incarnation == incarnation:
                return index
        return None

    def seat_of(self, incarnation: str) -> Seat | None:
        """Return the seat of this incarnation, or None."""
        rank = self.node_rank(incarnation)
        return None if rank is None else self.seats[rank]


class Budget(Record, frozen=True):
    """The facts known of the charged failures of a run, besides their number (see :mod:`.budget`)."""

    forgiven: Count = 0
    """The number of them that do not count against the budget any more."""
    progress_s: Annotated[float, Meta(ge=0, le=1e17)] = 0.0
    """The time for which training has made progress, as far as that may still forgive failures."""
    in_a_row: Count = 0
    """The number of them that came in a row since training last made progress."""
    signature: Signature = ""
    """Of the last one, if it came before any progress and ended the generation before the newest one."""


class Member(Record, frozen=True):
    """A node's record about itself; only that node writes it."""

    version: int
    node_id: Name
    incarnation: Name
    address: Host
    slots: Slots
    state: State
    generation: Generation
    policy: Policy
    bootstrap: Address | None = None
    """The store offered for the generation this node is ready for."""
    failure: Failure | None = None
    """The failure on this node; of a node that is ready: why it offers no store."""
    stop_s: Seconds = 0.0
    """The longest time that stopping the workers may take, as announced."""
    replaces: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    """Earlier incarnations of this node whose workers are proven gone."""
    preferred_rank: Count | None = None
    role: Text = "default"
    fingerprint: Fingerprint = Fingerprint()
    history: Plan | None = None
    """The newest plan that the node knows, for a store without it."""
    handles_notices: bool = False
    """Workers of this node handle notices."""
    warms_up: bool = False
    """Workers of this node are being started apart from any world, and are not parked yet: nobody waits for it."""
    stop_request: StopRequest | None = None
    """Until the coordinator has acknowledged it."""

    @property
    def is_leaving(self) -> bool:
        """Return whether the node will not return."""
        return self.state in (State.LEAVING, State.LEFT)

    @property
    def clear(self) -> int:
        """The generation below which no worker of the node runs, as far as its state says."""
        if self.state is State.LEFT:
            return MAX_GENERATION + 2
        return {State.READY: self.generation, State.STOPPED: self.generation + 1}.get(self.state, 0)


class Lease(Record, frozen=True):
    """A node's right to be counted. Renewal and revocation both compare-and-set this record."""

    incarnation: Name
    ttl_s: LeaseSeconds
    beat: Count = 0
    revoked: bool = False
    why: Text = ""
    """Why it was revoked, in words."""

    def renewed(self) -> Lease:
        """Return the record a renewal writes over this one."""
        return msgspec.structs.replace(self, beat=self.beat + 1)

    def revoke(self, why: str = "") -> Lease:
        """Return the record a revocation writes over this one; it can never be renewed again."""
        return msgspec.structs.replace(self, revoked=True, why=why[:512])


class Refusal(Struct, frozen=True, omit_defaults=True):
    """Why an incarnation may not take part."""

    why: Text
    is_node_id_held: bool = False
    """A living agent has its node id."""


class Plan(Record, frozen=True):
    """The coordinator's latest decision. Each version follows exactly the one before.

    The newest one is also what machines keep of the run on their disks, its *history*, for a store without it. The
    coordinator writes a plan to its disk before any node can read it.
    """

    format: int
    version: Version
    phase: Phase
    generation: Generation
    reason: Text
    policy: Policy
    world: World | None = None
    """Running, finished: this generation's. Forming: the previous one's. None before the first."""
    uncleared: tuple[Seat, ...] = ()
    """Forming, stopped: seats of earlier generations whose workers may still run until they are cleared."""
    charged: Count = 0
    """Restarts charged to the budget so far, those included that are forgiven; only grows."""
    budget: Budget = Budget()
    failure: Failure | None = None
    """Forming: the failure that ended the previous generation (charged or not when sealing).
    Failed: the failure the run ended with."""
    failed_node: Name | None = None
    lost: tuple[Name, ...] = ()
    """Forming, failed: the nodes that were lost while the previous generation ran."""
    free: bool = False
    """Forming: a participant of the previous generation is known to have been lost, to have restarted or to have
    left, so its failure is not charged."""
    succeeded: tuple[Name, ...] = ()
    """Incarnations whose success in this generation is kept although they are gone."""
    order: tuple[Name, ...] = ()
    """Every node that ever had a seat, in the order its ranks follow."""
    refused: dict[Name, Refusal] = {}
    """Incarnations that may not take part."""
    joining: tuple[Name, ...] = ()
    """Forming: the nodes to let in which the previous generation was ended."""
    losses: dict[Name, Count] = {}
    """The times in a row that each node was lost or started late without progress, or was let in and did not come."""
    start_failures: dict[Name, Count] = {}
    """The times in a row that each node failed before user code ran."""
    avoid_bootstrap: tuple[Name, ...] = ()
    """Nodes whose bootstrap store could not be reached from everywhere."""
    notice: Notice | None = None
    """The notice to the workers of the running world; while the next one forms, the notice that they will get."""
    leaving: tuple[Name, ...] = ()
    """Incarnations that are to leave and whose workers may still run."""
    acknowledged: dict[Name, Count] = {}
    """The newest request of each incarnation that was acknowledged."""
    requeuer: Name | None = None
    """Stopped: the incarnation whose agent acts for the run outside of it (requeues the job, say)."""
    life: Generation = 1
    """The first generation since the run began, or was resumed after a stop; earlier requests are void."""
    settled: bool = False
    """On a disk only: every live node knew the outcome; nodes that join now start a new run, above this generation."""

    @property
    def is_terminal(self) -> bool:
        """Return whether the run is over."""
        return self.phase.is_terminal

    @property
    def seats(self) -> tuple[Seat, ...]:
        """Those of the world; none without one."""
        return self.world.seats if self.world is not None else ()

    @property
    def seats_at_risk(self) -> tuple[Seat, ...]:
        """Every seat whose workers may run: those of the world, and those awaited before."""
        return tuple({seat.incarnation: seat for seat in (*self.uncleared, *self.seats)}.values())

    def following(self, reason: str | None = None, **changes: Any) -> Plan:
        """Return the next version of the plan with these changes; without a reason, that of this version."""
        reason = self.reason if reason is None else reason[:LONGEST_TEXT]
        return msgspec.structs.replace(self, version=self.version + 1, reason=reason, **changes)

    def forming(self, reason: str, **changes: Any) -> Plan:
        """Return the plan that forms the generation after this one; seats at risk are to be cleared first."""
        fresh: dict[str, Any] = {"succeeded": (), "notice": None, "lost": ()}
        return self.following(
            reason,
            phase=Phase.FORMING,
            generation=self.generation + 1,
            uncleared=self.seats_at_risk,
            **{**fresh, **changes},
        )

    @property
    def as_history(self) -> Plan:
        """The plan without what a history does not need, so that a member record has room for it."""
        return msgspec.structs.replace(self, uncleared=(), refused={}, acknowledged={})

    @property
    def sealed(self) -> int:
        """The generation of the newest world; -1: there is none."""
        return self.world.generation if self.world is not None else -1

    @property
    def rank(self) -> tuple[int, int, bool, bool]:
        """Of two plans of one run on disks, the one that ranks higher is the newer.

        A coordinator may have written either to its disk without publishing it: so a world, in which workers may run,
        ranks above an outcome.
        """
        return self.generation, self.sealed, self.is_terminal, self.settled

    def is_later_than(self, plan: Plan) -> bool:
        """Return whether this history is of a later generation, or names a world of one that the plan only forms.

        Another coordinator has sealed that world, for a store that is lost.
        """
        return self.generation > plan.generation or self.sealed == plan.generation > plan.sealed

    @property
    def newness(self) -> tuple[object, ...]:
        """The same, and of two that rank alike the one that knows of more progress is the newer.

        If they know of the same, the one with the larger world.
        """
        names = [seat.incarnation for seat in self.seats]
        return *self.rank, self.charged, self.budget.progress_s, -self.budget.in_a_row, len(names), names


class Waiting(Struct, frozen=True, omit_defaults=True):
    """The condition that the coordinator waits for, as it tells the nodes."""

    reason: str = ""
    """In words; empty: nothing is known."""
    lacks_nodes: bool = False
    """Fewer nodes have joined than required, or than the first world may have."""
    joined: tuple[str, ...] = ()
    """The ids of those that have, then; empty: they are too many to be written."""
