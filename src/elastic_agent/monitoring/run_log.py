"""The history of a run from its plans: which generations there were, when, and why they ended. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from elastic_agent.diagnosis.cause import RootCause, described, headline, render
from elastic_agent.protocol import FailureKind, Phase, Plan, World, names

from .status import GenerationStatus, NodeStatus, unexplained

KEPT_GENERATIONS = 1000
KEPT_WORLDS = 3
KEPT_DEPARTURES = 100

KEPT_STACKS = 10
"""Of so many generations, the newest that hung, the stacks are kept: those of a large world take a megabyte."""

NOT_RECORDED = "not recorded (an agent that is killed records nothing)"
NOT_SEEN = "not seen on this machine"

NO_LEASE = "it did not renew its lease"
SLOW_OR_NO_LEASE = f"{NO_LEASE}, or did not stop its workers in time"
"""Of a node that was lost while the next generation formed."""


_SYMPTOMS = {
    FailureKind.WORKER: "workers failed",
    FailureKind.START: "workers did not start",
    FailureKind.BOOTSTRAP: "workers did not start",
}
"""The certain part of a failure before all nodes have reported: another node may have caused it."""


@dataclass(frozen=True)
class Change:
    """The changes that a plan made."""

    ended: tuple[int, ...] = ()
    """Generations that it ended."""
    has_begun: bool = False
    """Its generation is a new one that runs."""


class RunLog:
    """The generations of one run, from the first plan that was seen, and those that earlier agents have recorded."""

    def __init__(self, node_id: str) -> None:
        """Begin empty; ``node_id``: of this machine."""
        self._node_id = node_id
        self.plan: Plan | None = None
        """The newest."""
        self.since_s: float | None = None
        """Since when the run is in the phase and generation of :attr:`plan`; seconds since 1970; None: not seen."""
        self._worlds: dict[int, World] = {}
        self._failures: dict[int, Plan] = {}
        self._generations: dict[int, GenerationStatus] = {}
        self._earlier: dict[int, GenerationStatus] = {}
        """Those that earlier agents have recorded."""
        self._first: Plan | None = None
        """The first plan that was seen."""
        self._last: World | None = None
        """The newest world that has run."""
        self._departures: dict[str, NodeStatus] = {}

    @property
    def departures(self) -> tuple[NodeStatus, ...]:
        """The nodes that have left the world or were lost, the newest last; at most :data:`KEPT_DEPARTURES`."""
        return tuple(self._departures.values())

    @property
    def failures(self) -> Mapping[int, Plan]:
        """Of the generations whose worlds are known: those that failed, and the plans that ended them."""
        return self._failures

    @property
    def generations(self) -> tuple[GenerationStatus, ...]:
        """The newest :data:`KEPT_GENERATIONS`, the oldest of them first."""
        known = {number: row for number, row in self._earlier.items() if self._may_precede(number)}
        known |= self._generations
        return tuple(known[number] for number in sorted(known)[-KEPT_GENERATIONS:])

    @property
    def last(self) -> GenerationStatus | None:
        """The newest generation that was seen."""
        return self._generations[max(self._generations)] if self._generations else None

    def recall(self, recorded: Iterable[GenerationStatus]) -> None:
        """Put these generations, which earlier agents of the run have recorded, before those that are seen."""
        self._earlier = {row.generation: self._ended(row) for row in recorded}
        self._forget_stacks()

    def _ended(self, row: GenerationStatus) -> GenerationStatus:
        """Return a generation as it was recorded, which does not run any more, although its end may not be recorded."""
        if not row.is_running:
            return row
        others = [node_id for node_id in row.nodes if node_id != self._node_id]
        more = f"; elastic-agent why on {others[0]} may tell" if others else ""
        return _without_end(row, f"{NOT_RECORDED}{more}")

    def _may_precede(self, generation: int) -> bool:
        """Tell whether a run that is seen from its first plan on can have had this generation before."""
        first = self._first
        if first is None or generation < first.generation:
            return True
        return generation == first.generation and first.phase is not Phase.FORMING

    def world(self, generation: int) -> World | None:
        """Return the world of one of the last :data:`KEPT_WORLDS` generations."""
        return self._worlds.get(generation)

    def see(self, plan: Plan, now_s: float, incarnation: str, *, was_away: bool = False) -> Change:
        """Take note of the next plan.

        Args:
            plan: the newest; a node that was away has not seen those before it.
            now_s: seconds since 1970.
            incarnation: of this machine's node.
            was_away: this node had lost its lease: the end of the last generation was not seen.
        """
        before, self.plan = self.plan, plan
        is_seen = not was_away and not _misses_end(before, plan)
        if self._first is None:
            self._first = plan
        if before is None or (before.phase, before.generation) != (plan.phase, plan.generation):
            self.since_s = now_s
        ended = self._end(plan, now_s, is_seen=is_seen)
        if not is_seen:
            self._last = plan.world  # which nodes are gone since the one before, and why, was not seen
        self._note_departures(before, plan, now_s)
        world = plan.world if plan.phase is Phase.RUNNING else None
        if world is None or plan.generation in self._generations:
            return Change(ended)
        self._worlds[plan.generation] = world
        nodes = tuple(seat.node_id for seat in world.seats)
        # A node that has a seat was registered before this generation began.
        is_present = world.seat_of(incarnation) is not None
        is_formed = before is not None and before.generation == plan.generation and not was_away
        self._generations[plan.generation] = GenerationStatus(
            plan.generation,
            now_s,
            nodes=nodes,
            workers=world.world_size,
            began_earlier=not (is_present or is_formed),
        )
        if not (is_present or is_formed):
            self.since_s = None
        self._forget_old()
        return Change(ended, has_begun=True)

    def explain(self, generation: int, cause: RootCause, stacks: str = "") -> None:
        """Note the root cause of a generation's end, and where its workers were if they hung.

        The plan that ended the generation names what was noticed first, which may be another node's trouble with it.
        """
        known = self._generations.get(generation)
        if known is not None:
            self._generations[generation] = msgspec.structs.replace(
                known,
                end=described(cause) if cause.is_certain else headline(cause),
                cause=render(cause),
                culprit=cause.worker,
                stacks=stacks,
                is_pending=False,
            )
            self._forget_stacks()

    def _end(self, plan: Plan, now_s: float, *, is_seen: bool) -> tuple[int, ...]:
        """Note which generations a plan ends; ``is_seen``: now, and as the plan says."""
        ended = tuple(
            number
            for number, row in self._generations.items()
            if row.is_running and (plan.generation > number or plan.phase is not Phase.RUNNING)
        )
        failed, noticed = _is_failure(plan), symptom(plan)
        for number in ended:
            if not is_seen:
                self._generations[number] = _unseen(self._generations[number], plan, self._node_id)
                continue
            self._generations[number] = msgspec.structs.replace(
                self._generations[number],
                ended_s=now_s,
                end=noticed or plan.reason,
                failed=failed,
                is_pending=bool(noticed),
            )
            if failed:
                self._failures[number] = plan
        return ended

    def _note_departures(self, before: Plan | None, plan: Plan, now_s: float) -> None:
        """Note which nodes of the last world are gone; a node that is in the present one has come back."""
        running = plan.world if plan.phase is Phase.RUNNING else None
        stay = {seat.node_id for seat in running.seats} if running is not None else set()
        ending = plan if running is None or before is None else before
        for seat in self._last.seats if self._last is not None else ():
            # Often a node is known to be lost only while the next world forms: then it is counted.
            counted = plan.losses.get(seat.node_id, 0) > (before.losses.get(seat.node_id, 0) if before else 0)
            is_lost = seat.node_id in plan.lost or counted
            has_left = running is not None and seat.node_id not in stay
            known = self._departures.get(seat.node_id)
            reason = _departure_reason(seat.node_id, ending, is_lost=is_lost)
            if known is None and (is_lost or has_left or seat.incarnation in plan.leaving):
                role = "lost" if is_lost else "left"
                self._departures[seat.node_id] = NodeStatus(
                    seat.node_id,
                    role,
                    address=seat.address,
                    workers=seat.slots,
                    note=reason,
                    departed_s=now_s,
                )
            elif known is not None and is_lost and known.role != "lost":
                self._departures[seat.node_id] = msgspec.structs.replace(known, role="lost", note=reason)
        if running is not None:
            self._last = running
            for node_id in stay & self._departures.keys():
                del self._departures[node_id]
        while len(self._departures) > KEPT_DEPARTURES:
            del self._departures[next(iter(self._departures))]

    def _forget_stacks(self) -> None:
        for row in [row for row in self.generations if row.stacks][:-KEPT_STACKS]:
            rows = self._generations if row.generation in self._generations else self._earlier
            rows[row.generation] = msgspec.structs.replace(row, stacks="")

    def _forget_old(self) -> None:
        while len(self._generations) > KEPT_GENERATIONS:
            self._generations.pop(min(self._generations))
        while len(self._worlds) > KEPT_WORLDS:
            oldest = min(self._worlds)
            self._worlds.pop(oldest)
            self._failures.pop(oldest, None)
            if oldest in self._generations:  # it cannot be explained any more
                self._generations[oldest] = unexplained(self._generations[oldest])


def _misses_end(before: Plan | None, plan: Plan) -> bool:
    """Tell whether the plan that ended the generation of the one before lies between the two."""
    if before is None or before.phase is not Phase.RUNNING or plan.generation <= before.generation:
        return False
    return plan.generation > before.generation + 1 or plan.phase in (Phase.RUNNING, Phase.FINISHED)


def _unseen(row: GenerationStatus, plan: Plan, node_id: str) -> GenerationStatus:
    """Return a generation that ended while this node was away, with the name of a node that was there."""
    seats = plan.world.seats if plan.world is not None else ()
    stayed = [seat.node_id for seat in seats if seat.node_id in row.nodes and seat.node_id != node_id]
    more = f"; run elastic-agent why on {stayed[0]}" if stayed else ""
    return _without_end(row, f"{NOT_SEEN}{more}")


def _without_end(row: GenerationStatus, why: str) -> GenerationStatus:
    return msgspec.structs.replace(row, end=why, cause=f"its end was {why}")


def _departure_reason(node_id: str, plan: Plan, *, is_lost: bool) -> str:
    """Return why a node is gone as far as that is certain; a failure of another node's worker is no reason."""
    if plan.failure is not None and plan.failed_node == node_id:
        return plan.failure.summary
    if is_lost:
        return NO_LEASE if node_id in plan.lost else SLOW_OR_NO_LEASE
    return plan.reason if plan.failure is None else ""


def symptom(plan: Plan) -> str:
    """Return what is certain of a failure that ended a generation; empty: the plan has the reason."""
    failed = _SYMPTOMS.get(plan.failure.kind, "") if plan.failure is not None else ""
    return f"{failed}, {names(plan.lost)} lost" if failed and plan.lost else failed


def _is_failure(plan: Plan) -> bool:
    """Return whether this plan ended a generation because of a failure or the loss of a node."""
    return (
        plan.failure is not None
        or plan.phase is Phase.FAILED
        or (plan.free and not (plan.notice or plan.leaving))
    )
