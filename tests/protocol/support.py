"""Builders of records, and a table at which nodes say things and a coordinator decides; time is a number."""

from __future__ import annotations

import msgspec

from elastic_agent.protocol.cluster_view import Decision
from elastic_agent.protocol.codec import decode, encode
from elastic_agent.protocol.coordinator import Coordinator
from elastic_agent.protocol.records import (
    RECORD_VERSION,
    Address,
    Failure,
    FailureKind,
    Job,
    Lease,
    Member,
    Phase,
    Plan,
    Policy,
    Seat,
    State,
    World,
)
from elastic_agent.values import SHORTEST_LEASE_S

TTL_S = 6.0
MARGIN_S = 1.0
SETTLE_S = 2.0
STEP_S = 0.25

POLICY = Policy(
    min_nodes=2,
    max_nodes=4,
    lease_ttl_s=TTL_S,
    fence_margin_s=MARGIN_S,
    settle_s=SETTLE_S,
    join_timeout_s=60.0,
    start_timeout_s=20.0,
)

CRASH = Failure(FailureKind.WORKER, "worker a/0 exited with code 1")
HANG = Failure(FailureKind.HANG, "worker a/0 made no progress for 60 s")
NO_START = Failure(FailureKind.START, "python: no such file")


def policy(**changes: object) -> Policy:
    """The run's rules, but for these."""
    return msgspec.structs.replace(POLICY, **changes)


def member(node: str, incarnation: str | None = None, **fields: object) -> Member:
    """A node that is ready for generation 1, unless told otherwise."""
    said = Member(
        version=RECORD_VERSION,
        node_id=node,
        incarnation=incarnation or f"{node}-1",
        address=f"{node}.example",
        slots=1,
        state=State.READY,
        generation=1,
        policy=POLICY,
        bootstrap=Address(f"{node}.example", 29500),
    )
    return msgspec.structs.replace(said, **fields)


def world(generation: int, *incarnations: str) -> World:
    """A world with one worker for each of these incarnations (``a-1`` is the first life of node ``a``)."""
    seats = tuple(
        Seat(incarnation.split("-")[0], incarnation, f"{incarnation.split('-')[0]}.example", 1, rank)
        for rank, incarnation in enumerate(incarnations)
    )
    return World(generation, seats, Address(seats[0].address, 29500), seats[0].node_id)


def plan(phase: Phase, generation: int, version: int, **fields: object) -> Plan:
    """A plan as a node reads it."""
    return msgspec.structs.replace(
        Plan(RECORD_VERSION, version, phase, generation, f"{phase} {generation}", POLICY), **fields
    )


def on_disk(
    generation: int,
    sealed: World | None = None,
    charged: int = 0,
    order: tuple[str, ...] = (),
    outcome: Phase | None = None,
    job: Job = Job(),  # noqa: B008 (immutable)
    **fields: object,
) -> Plan:
    """The newest plan of a run as a machine has it on its disk."""
    runs = sealed is not None and sealed.generation == generation
    phase = outcome or (Phase.RUNNING if runs else Phase.FORMING)
    rules = msgspec.structs.replace(POLICY, lease_ttl_s=SHORTEST_LEASE_S, fence_margin_s=0.0, job=job)
    known = plan(phase, generation, 1, world=sealed, charged=charged, order=order, policy=rules)
    return msgspec.structs.replace(known, **fields)


def settled(known: Plan) -> Plan:
    """The plan as it is on disk when every node has acknowledged the outcome."""
    return msgspec.structs.replace(known, settled=True)


class Table:
    """Everything that is in the store, and a coordinator whose decisions are carried out at once.

    Nodes renew their leases as time goes by, unless they have fallen silent.
    """

    def __init__(
        self,
        rules: Policy = POLICY,
        *,
        remembered: Plan | None = None,
        store_born_s: float = float("-inf"),
    ) -> None:
        self.rules = rules
        self.now_s = 0.0
        self.coordinator = Coordinator(0.0, remembered=remembered, store_born_s=store_born_s)
        self.members: dict[str, Member] = {}
        self.leases: dict[str, Lease] = {}
        self.silent: set[str] = set()
        self.newest: dict[str, str] = {}
        self.plans: list[Plan] = []
        self.revoked: list[str] = []
        self.last = Decision("nothing was asked yet")

    # -- what is there --------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The newest plan."""
        assert self.plans, "no plan yet"
        return self.plans[-1]

    @property
    def world(self) -> list[str]:
        """The nodes of the plan's world, in order."""
        assert self.plan.world is not None
        return [seat.node_id for seat in self.plan.world.seats]

    @property
    def stand(self) -> tuple[Phase, int]:
        """Phase and generation."""
        return self.plan.phase, self.plan.generation

    # -- what nodes do --------------------------------------------------------------------------

    def comes(self, node: str, life: int = 1, *, ttl_s: float | None = None, **fields: object) -> None:
        """An agent registers this incarnation of a node."""
        generation = 1
        if self.plans:
            generation = self.plan.generation if self.plan.phase is Phase.FORMING else 0
        said = member(node, f"{node}-{life}", generation=generation, policy=self.rules)
        said = msgspec.structs.replace(said, **fields)
        self.newest[node] = said.incarnation
        self.leases[said.incarnation] = Lease(said.incarnation, ttl_s or self.rules.lease_ttl_s)
        self._write(said)

    def says(self, node: str, state: State, generation: int | None = None, **fields: object) -> None:
        """The newest incarnation of this node changes its record."""
        self.life_says(self.newest[node], state, generation, **fields)

    def life_says(self, key: str, state: State, generation: int | None = None, **fields: object) -> None:
        """This incarnation changes its record; one whose records were removed has nothing to change."""
        if key not in self.members:
            return
        g = self.plan.generation if generation is None else generation
        known = msgspec.structs.replace(self.members[key], failure=None)
        self._write(msgspec.structs.replace(known, state=state, generation=g, **fields))

    def all_say(self, state: State, *nodes: str) -> None:
        """These nodes say the same, one after the other."""
        for node in nodes:
            self.says(node, state)

    def falls_silent(self, node: str) -> None:
        """The newest incarnation of this node renews no more."""
        self.silent.add(self.newest[node])

    def disappears(self, node: str) -> None:
        """Its records are not there any more."""
        self.members.pop(self.newest[node])
        self.leases.pop(self.newest[node])

    def change_coordinator(self) -> None:
        """Another coordinator takes over, by what is in the store."""
        self.coordinator = Coordinator(self.now_s, self.plan)
        for key, said in self.members.items():
            self.coordinator.observe(said, self.leases[key], self.now_s)
        self.carry_out()

    # -- time -----------------------------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        """Time goes by, a step at a time; who lives renews."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(self.now_s + STEP_S, until_s)
            for key, lease in self.leases.items():
                if key not in self.silent and not lease.revoked:
                    self.leases[key] = lease.renewed()
                    self.coordinator.observe(self.members[key], self.leases[key], self.now_s)
            self.carry_out()

    def _write(self, said: Member) -> None:
        self.members[said.incarnation] = said
        self.coordinator.observe(said, self.leases[said.incarnation], self.now_s)
        self.carry_out()

    def carry_out(self) -> None:
        """Ask the coordinator and do what it wants, until it wants nothing more."""
        for _ in range(20):
            wanted = self.last = self.coordinator.decide(self.now_s)
            if wanted.plan is None and not wanted.revoke and not wanted.forget:
                return
            if wanted.plan is not None:
                assert decode(Plan, encode(wanted.plan)) == wanted.plan, "no node could read this"
                self.plans.append(wanted.plan)
                self.coordinator.published(wanted.plan, self.now_s)
            for key in wanted.revoke:
                self.revoked.append(key)
                self.leases[key] = self.leases[key].revoke()
                self.coordinator.revoked(key)
            for key in wanted.forget:
                del self.members[key], self.leases[key]
                self.coordinator.forgotten(key)
        raise AssertionError(f"the coordinator never rests: {wanted}")


def running(*nodes: str, rules: Policy = POLICY, slots: int = 1) -> Table:
    """A table at which exactly these nodes run generation 1."""
    table = Table(rules)
    for node in nodes:
        table.comes(node, slots=slots)
    table.wait(0.0 if len(nodes) == rules.max_nodes else rules.settle_s)
    assert table.stand == (Phase.RUNNING, 1)
    table.all_say(State.RUNNING, *nodes)
    return table
