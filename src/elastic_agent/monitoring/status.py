"""The status of a run: from what the store holds, and from what one agent has seen. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from elastic_agent.diagnosis.hangs import find_standstill
from elastic_agent.diagnosis.records import NodeReport, Usage
from elastic_agent.protocol import FailureKind, Lease, Member, Phase, Plan, Seat, State, Waiting, end_reason

from .rates import find_stragglers

JOIN_CAUSES = (
    "common causes: an agent that has not started yet or ended with an error, a different --rdzv-endpoint or "
    "--rdzv-id on some machine, or a firewall between the machines"
)


IN_WORLD = "in the world"
"""The role of a node whose workers train."""
IN_LAST_WORLD = "in the last world"

UNKNOWN = "unknown"
"""The phase of a run that had not ended when it was last seen, and the state of its workers."""


class Goodput(Struct, frozen=True, omit_defaults=True):
    """The time that a node has spent since its agent was started, in seconds."""

    training_s: float = 0.0
    """From the first step that the workers report, or their start if they report none, until they end."""
    other_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The whole time, in seconds."""
        return self.training_s + self.other_s

    @property
    def share(self) -> float | None:
        """Training divided by the whole time, 0 to 1; None before any time has passed."""
        return self.training_s / self.total_s if self.total_s > 0 else None


class GenerationStatus(Struct, frozen=True, omit_defaults=True):
    """One generation of the run, as this agent saw it, or an earlier one that kept its status in the same folder."""

    generation: int
    began_s: float
    """When its workers were started; seconds since 1970. With :attr:`began_earlier`, when it was seen first."""
    ended_s: float | None = None
    """When it ended; None while it runs, or if that was not recorded or not seen."""
    nodes: tuple[str, ...] = ()
    workers: int = 0
    end: str = ""
    """Why it ended, in words: the root cause, as soon as it is determined."""
    cause: str = ""
    """The report on its root cause, or what is known instead if its end was not seen."""
    culprit: str = ""
    """The worker that is the root cause, such as ``n2/0``, or the node; empty: not known."""
    stacks: str = ""
    """Where its workers were, with their stacks, if they hung."""
    failed: bool = False
    """It ended because of a failure, or of the loss of a node."""
    is_pending: bool = False
    """Its root cause is being determined."""
    began_earlier: bool = False
    """Its begin was not seen: this machine was away, or not there yet."""

    @property
    def end_words(self) -> str:
        """Return why it ended, as far as that is certain."""
        return f"{self.end}; the root cause is being determined" if self.is_pending else self.end

    @property
    def is_running(self) -> bool:
        """Tell whether it has not ended; when it ended may be unknown."""
        return self.ended_s is None and not self.end


class NodeStatus(Struct, frozen=True, omit_defaults=True):
    """One node of the run."""

    node_id: str
    role: str
    """``in the world``, ``standing by``, ``joining``, ``rejoining``, ``leaving``, ``left``, ``lost``, ``refused`` or,
    after the run, ``ended``; ``in the last world`` while its workers of that world are being stopped."""
    state: str = ""
    """Of its workers, as the node announced it last; empty where the role implies it."""
    address: str = ""
    host: str = ""
    workers: int = 0
    first_rank: int | None = None
    step: int | None = None
    """The newest step that a worker of the node reported."""
    seen_s: float | None = None
    """When the node wrote its newest report, by its own clock; seconds since 1970."""
    note: str = ""
    """Why it is refused, or lost its lease."""
    steps_per_s: float | None = None
    """The speed of its training; None: not known."""
    waits: tuple[float | None, ...] = ()
    """Of each of its workers, the part of the time in which it waits in collectives; empty: not known."""
    log_dir: str = ""
    """Where the output of its workers is on its machine."""
    departed_s: float | None = None
    """When it was seen to leave the world or to be lost; seconds since 1970. None: it is there."""
    optimizer_steps: int | None = None
    """The most optimizer steps that were counted of one of its workers since the worker's start; None: not known."""
    steps: tuple[int | None, ...] = ()
    """Of each of its workers, as :attr:`step`, or else as :attr:`optimizer_steps`; empty: not known."""
    usage: dict[int, Usage] = {}
    """The resources that its workers take, by slot."""


class Standstill(Struct, frozen=True, omit_defaults=True):
    """Workers that wait for each other at present."""

    since_s: float
    """At the latest since when; seconds since 1970."""
    summary: str
    """Names the worker that the others wait for."""
    stacks: str = ""
    """Where all ranks are, with their stacks."""


class RunStatus(Struct, frozen=True):
    """The status of a run at one time. As JSON it has all these keys."""

    run_id: str
    endpoint: str
    asked_s: float
    """When it was determined; seconds since 1970."""
    phase: str = ""
    """``forming``, ``running``, ``finished``, ``failed`` or ``stopped``; empty: there is no plan yet; ``unknown``: this
    is not the present status, and the run had not ended then."""
    generation: int = 0
    """The present one; of a run that has ended, the last one that ran, as far as this agent knows."""
    since_s: float | None = None
    """Since when it is in this phase, as far as this agent knows."""
    reason: str = ""
    """Why it is in this phase."""
    waiting_for: str = ""
    """The condition that the coordinator waits for; empty while the run trains."""
    common_causes: str = ""
    """Of nodes not joining, while too few have and the run has not run yet."""
    notice: str = ""
    """Why workers are asked to save and exit."""
    world_size: int = 0
    restarts: int = 0
    """Charged restarts that count against the budget."""
    max_restarts: int = 0
    nodes: tuple[NodeStatus, ...] = ()
    generations: tuple[GenerationStatus, ...] = ()
    goodput: Goodput | None = None
    """Of the node whose agent determined the status."""
    stragglers: tuple[str, ...] = ()
    """Workers that are slower than the others, a line for each, the slowest first; none in a standstill."""
    standstill: Standstill | None = None
    """The workers make no progress, as at least one waits for others."""
    problem: str = ""
    """Why the store could not be read; then this is what the agent last knew."""
    node_id: str = ""
    """The node whose agent determined the status."""
    left: str = ""
    """Why that node has left the run or could not take part; the run may go on without it."""
    silent_since_s: float | None = None
    """Since when the store has not answered that node's agent, if it could not be read; seconds since 1970."""
    is_paused: bool = False
    """The store does not answer, and no worker of the node that has trained before runs meanwhile."""
    remedy: str = ""
    """Advice for a store that does not answer."""
    store: dict[str, str] = {}
    """Of each machine that hosts a member of the store, whether it ``leads`` or ``follows``, or what is wrong with it;
    none: one machine hosts it, or others do."""
    serves: tuple[str, ...] = ()
    """Nodes that needed the store of that node's agent when it had left the run; it stays to serve them."""

    @property
    def is_over(self) -> bool:
        """The run has ended."""
        return self.phase in ("finished", "failed", "stopped")

    @property
    def has_plan(self) -> bool:
        """A plan of the run is known, and not only what earlier agents have recorded."""
        return bool(self.phase) and (self.phase != UNKNOWN or bool(self.reason))


def outdated(status: RunStatus) -> RunStatus:
    """Return a status that is not the present one without what may not hold any more."""
    if status.is_over or not status.phase:
        return status
    return replace(
        status,
        phase=UNKNOWN,
        since_s=None,
        nodes=tuple(
            replace(node, state=UNKNOWN) if node.role in (IN_WORLD, "leaving") else node
            for node in status.nodes
        ),
        stragglers=(),
        standstill=None,
    )


def unexplained(row: GenerationStatus) -> GenerationStatus:
    """Return a generation as an agent recorded it that has ended, so that it determines no root cause any more."""
    end = f"{row.end}; the root cause was not recorded" if row.is_pending else row.end
    return replace(row, end=end, is_pending=False)


def of_ended_agent(status: RunStatus) -> RunStatus:
    """Return a status that an agent saved before it ended without the ages of what it saw, if the run may go on.

    A node that was leaving has left.
    """
    if status.is_over:
        return status
    last = status.generations[-1] if status.generations else None
    others = {*last.nodes} - {status.node_id} if status.left and last is not None else set()

    def aged(node: NodeStatus) -> NodeStatus:
        role = IN_LAST_WORLD if node.role == "left" and node.node_id in others else node.role
        node = replace(node, role=role, seen_s=None)
        if role != "leaving":
            return node
        why = "" if last is not None and last.failed else status.reason
        ended_s = last.ended_s if last is not None else None
        return replace(node, role="left", state="", note=why, departed_s=ended_s or status.asked_s)

    return outdated(replace(status, nodes=tuple(map(aged, status.nodes))))


def join_causes(waiting: Waiting) -> str:
    """Return what usually keeps nodes from joining a run for the first time, if too few have; empty otherwise."""
    return JOIN_CAUSES if waiting.lacks_nodes else ""


def run_status(
    known: RunStatus,
    plan: Plan | None,
    *,
    waiting: Waiting | None = None,
    members: Mapping[str, Member] | None = None,
    leases: Mapping[str, Lease] | None = None,
    reports: Sequence[NodeReport] = (),
    departures: Sequence[NodeStatus] = (),
) -> RunStatus:
    """Return the status of a run by what the store holds, added to what the agent itself knows.

    Args:
        known: what the agent knows: among others the generations, since when the phase of the plan lasts, and why the
            store could not be read.
        plan: the newest, or None before the first.
        waiting: what the coordinator waits for, if that is known.
        members: member records by incarnation.
        leases: the same of leases.
        reports: the newest report of each node.
        departures: the nodes that have left the world since, as this agent saw it, and how.
    """
    nodes = _Nodes(plan, members or {}, leases or {}, {report.node_id: report for report in reports})
    status = replace(
        known,
        waiting_for=waiting.reason if waiting is not None else "",
        common_causes=join_causes(waiting) if waiting is not None else "",
        nodes=nodes.all(departures),
    )
    if plan is None:
        return _recorded(status)
    planned = _planned(status, plan, [report for report in reports if report.generation == plan.generation])
    return outdated(planned) if known.problem else planned


def _recorded(status: RunStatus) -> RunStatus:
    """Return the status with what earlier agents have recorded, where no plan is known."""
    if not status.generations:
        return status
    last, phase = status.generations[-1], UNKNOWN if status.problem else ""
    return replace(status, phase=phase, generation=last.generation, world_size=last.workers if phase else 0)


def _planned(status: RunStatus, plan: Plan, present: Sequence[NodeReport]) -> RunStatus:
    """Return the status with what the plan says, and the reports of its generation (``present``)."""
    forms, running = plan.phase is Phase.FORMING, plan.world if plan.phase is Phase.RUNNING else None
    standstill = _standstill(present, running.world_size, status.asked_s) if running is not None else None
    trains = running is not None and standstill is None  # a worker that hangs is not slow
    # The plan that ends a run may have a number of its own, as it ended a generation that was still forming.
    number = status.generations[-1].generation if plan.is_terminal and status.generations else plan.generation
    return replace(
        status,
        phase=plan.phase.value,
        generation=number,
        reason=_reason(plan, status.generations),
        waiting_for=status.waiting_for if forms else "",
        common_causes=status.common_causes if forms and plan.world is None else "",
        notice=plan.notice.words if plan.notice is not None and not plan.is_terminal else "",
        world_size=running.world_size if running is not None else 0,
        restarts=max(0, plan.charged - plan.budget.forgiven),
        max_restarts=plan.policy.max_restarts,
        stragglers=find_stragglers(present) if trains else (),
        standstill=standstill,
    )


_OF_WORKERS = (FailureKind.WORKER, FailureKind.HANG, FailureKind.START)
"""The failures that end a generation that has begun."""


def _reason(plan: Plan, generations: Sequence[GenerationStatus]) -> str:
    """Return why the run is in its phase; of a failure the root cause, and not what was noticed first."""
    last, failure = generations[-1] if generations else None, plan.failure
    if last is None or failure is None or failure.kind not in _OF_WORKERS:
        return plan.reason
    if last.began_earlier and not last.is_pending and not last.culprit:
        return plan.reason  # this node was not there, and determines no root cause
    is_its_end = last.failed and plan.world is not None and plan.world.generation == last.generation
    if not is_its_end or (failure.kind is FailureKind.HANG and not last.cause):
        return plan.reason
    return last.end_words if plan.phase is Phase.FORMING else end_reason(plan, last.end_words) or plan.reason


def _standstill(present: Sequence[NodeReport], world_size: int, asked_s: float) -> Standstill | None:
    since_s = [report.written_s - report.stalled_s for report in present if report.stalled_s is not None]
    hang = find_standstill(present, world_size) if since_s else None
    # The clocks of the machines may differ: the newest of these times is not too early.
    return (
        Standstill(min(max(since_s), asked_s), hang.summary_now, hang.details) if hang is not None else None
    )


@dataclass(frozen=True)
class _Nodes:
    """The records of which the rows of the table are made: members and leases by incarnation, reports by node."""

    plan: Plan | None
    members: Mapping[str, Member]
    leases: Mapping[str, Lease]
    reports: Mapping[str, NodeReport]

    def all(self, departures: Sequence[NodeStatus]) -> tuple[NodeStatus, ...]:
        """Return the nodes of the world by rank, then the others by name, then those that are gone."""
        plan = self.plan
        seats = plan.world.seats if plan is not None and plan.world is not None else ()
        rows = [self._seated(seat) for seat in seats]
        seated = {seat.incarnation for seat in seats}
        # A node that was restarted has two records for a while.
        known = (
            {seat.node_id for seat in seats} if plan is not None and plan.phase is Phase.RUNNING else set()
        )
        others = sorted(self.members.values(), key=lambda node: (node.node_id, node.incarnation))
        departed = {node.node_id for node in departures}
        for member in others:
            has_row = member.node_id in (known if member.state is State.READY else known | departed)
            if member.incarnation not in seated and member.state is not State.LEFT:
                row = self._unseated(member, has_row=has_row)
                if row is not None:
                    rows.append(row)
        present = {row.node_id for row in rows}
        return (*rows, *(node for node in departures if node.node_id not in present))

    def _seated(self, seat: Seat) -> NodeStatus:
        plan = self.plan
        assert plan is not None  # it has the seat
        member, lease = self.members.get(seat.incarnation), self.leases.get(seat.incarnation)
        runs = plan.phase is Phase.RUNNING
        role = self._seated_role(plan, seat, member)
        note = ""
        # A node that has left renews its lease no more, so it is revoked, too.
        has_left = role in ("left", "ended") and (member is None or member.state is State.LEFT)
        if lease is not None and lease.revoked and not has_left:
            role, note = "lost", lease.why
        state = member.state.value if member is not None and role not in ("left", "ended") else ""
        return self._row(seat, role, state, note, rank=seat.first_rank if runs else None)

    def _seated_role(self, plan: Plan, seat: Seat, member: Member | None) -> str:
        if plan.is_terminal:
            return "ended"
        if plan.phase is Phase.RUNNING:
            return IN_WORLD
        # Without any record, none has been read: the plan alone is known.
        if (member is None and self.members) or (member is not None and member.state is State.LEFT):
            return "left"
        if seat.incarnation in plan.leaving:
            return "leaving"
        return "joining" if member is not None and member.state is State.READY else IN_LAST_WORLD

    def _unseated(self, member: Member, *, has_row: bool) -> NodeStatus | None:
        """Return the row of a node without a seat; ``has_row``: by another record it has one, or is gone."""
        plan, lease = self.plan, self.leases.get(member.incarnation)
        if lease is None or lease.revoked:
            return None  # an earlier incarnation
        refusal = plan.refused.get(member.incarnation) if plan is not None else None
        if refusal is not None:
            role = "refused"
        elif member.state is not State.READY and plan is not None and has_row:
            return None  # its workers of an earlier world, whose end it did not announce
        elif plan is not None and plan.is_terminal:
            role = "ended"
        elif plan is None or member.state is State.READY:  # it has no workers yet
            standing = "standing by" if plan is not None and plan.phase is Phase.RUNNING else "joining"
            role = "rejoining" if has_row else standing
        else:
            is_leaving = member.state is State.LEAVING or member.incarnation in plan.leaving
            role = "leaving" if is_leaving else IN_LAST_WORLD
        state = member.state.value if role != "ended" else ""
        return self._row(member, role, state, refusal.why if refusal is not None else "")

    def _row(
        self, node: Seat | Member, role: str, state: str, note: str, rank: int | None = None
    ) -> NodeStatus:
        report = self.reports.get(node.node_id)
        generation = self.plan.generation if self.plan is not None else None
        present = report if report is not None and report.generation == generation else None
        workers = present.workers if present is not None else ()
        return NodeStatus(
            node.node_id,
            role,
            state,
            node.address,
            report.host if report is not None else "",
            node.slots,
            rank,
            max((worker.step for worker in workers if worker.step is not None), default=None),
            report.written_s if report is not None else None,
            note,
            steps_per_s=present.steps_per_s if present is not None else None,
            waits=tuple(worker.waits for worker in workers),
            log_dir=report.log_dir if report is not None else "",
            optimizer_steps=max((worker.optimizer_steps or 0 for worker in workers), default=0) or None,
            steps=tuple(worker.step or worker.optimizer_steps for worker in workers),
            usage=present.usage if present is not None else {},
        )
