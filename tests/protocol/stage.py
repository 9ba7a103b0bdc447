"""A coordinator on a stage: nodes say things at given times, and the coordinator's decisions are carried out."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from elastic_agent.protocol.coordinator import Coordinator
from elastic_agent.protocol.records import (
    RECORD_VERSION,
    Address,
    Failure,
    FailureKind,
    History,
    Lease,
    Member,
    Phase,
    Plan,
    Policy,
    Seat,
    State,
    World,
)
from elastic_agent.protocol.situation import Decision

POLICY = Policy(
    min_nodes=2,
    max_nodes=3,
    max_restarts=2,
    lease_ttl_s=6.0,
    fence_margin_s=1.0,
    settle_s=1.0,
    join_timeout_s=100.0,
    start_timeout_s=30.0,
)


def member(
    incarnation: str,
    state: State = State.READY,
    generation: int = 0,
    *,
    node: str | None = None,
    policy: Policy = POLICY,
    slots: int = 1,
    replaces: tuple[str, ...] = (),
    failure: Failure | None = None,
    history: History | None = None,
    stop_s: float = 2.0,
) -> Member:
    """A member record; the node is named like the incarnation up to its dot: ``a.2`` is node ``a``."""
    return Member(
        version=RECORD_VERSION,
        node_id=node or incarnation.partition(".")[0],
        incarnation=incarnation,
        address="127.0.0.1",
        slots=slots,
        state=state,
        generation=generation,
        policy=policy,
        bootstrap=Address("127.0.0.1", 29500),
        failure=failure,
        replaces=replaces,
        history=history,
        stop_s=stop_s,
    )


def world(generation: int, *incarnations: str) -> World:
    """A world with one worker on each of these."""
    seats = tuple(
        Seat(name.partition(".")[0], name, "127.0.0.1", 1, rank) for rank, name in enumerate(incarnations)
    )
    return World(generation, seats, Address("127.0.0.1", 29500), seats[0].node_id)


@dataclass
class Stage:
    """A run with a coordinator of its own. ``now_s`` only goes forward."""

    policy: Policy = POLICY
    remembered: History | None = None
    now_s: float = 0.0
    plans: list[Plan] = field(default_factory=list)
    leases: dict[str, Lease] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    """Incarnations that do not renew any more."""

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(self.now_s, None, self.remembered)

    @property
    def plan(self) -> Plan:
        """The newest plan."""
        assert self.plans, "nothing was published"
        return self.plans[-1]

    @property
    def seated(self) -> list[str]:
        """The incarnations of the newest world, in order of their ranks."""
        assert self.plan.world is not None
        return [seat.incarnation for seat in self.plan.world.seats]

    def says(self, incarnation: str, state: State, generation: int, **more: object) -> Stage:
        """A node writes this about itself."""
        known = self.members.get(incarnation) or member(incarnation, policy=self.policy)
        self.members[incarnation] = msgspec.structs.replace(
            known, state=state, generation=generation, **{"failure": None, **more}
        )
        self.leases.setdefault(incarnation, Lease(incarnation, self.policy.lease_ttl_s))
        self.coordinator.observe(self.members[incarnation], self.leases[incarnation], self.now_s)
        return self.act()

    def arrives(self, *incarnations: str, **more: object) -> Stage:
        """New agents register; they then follow the plan by saying ready."""
        for name in incarnations:
            self.says(name, State.READY, 0, **more)
        self.all_ready(*incarnations)
        return self

    def all_ready(self, *incarnations: str) -> Stage:
        """These (or all that live) say that they are ready for the generation being formed."""
        for name in incarnations or sorted(set(self.members) - self.silent):
            if self.plan.phase is Phase.FORMING:
                self.says(name, State.READY, self.plan.generation)
        return self

    def all_run(self) -> Stage:
        """All seated nodes say that their workers run."""
        for name in self.seated:
            self.says(name, State.RUNNING, self.plan.generation)
        return self

    def fails(
        self,
        incarnation: str,
        kind: FailureKind = FailureKind.WORKER,
        summary: str = "exit code 1",
        **more: str,
    ) -> Stage:
        """A node reports a failure."""
        failure = Failure(kind, f"{incarnation}: {summary}", **more)  # type: ignore[arg-type]
        return self.says(incarnation, State.FAILED, self.plan.generation, failure=failure)

    def dies(self, *incarnations: str) -> Stage:
        """These do not renew any more."""
        self.silent.update(incarnations)
        return self

    def wait(self, duration_s: float) -> Stage:
        """Time passes; whoever is not silent renews every second."""
        end_s = self.now_s + duration_s
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + 0.5)
            for name, lease in self.leases.items():
                if name not in self.silent and not lease.condemned:
                    self.leases[name] = lease.renewed()
                    self.coordinator.observe(self.members[name], self.leases[name], self.now_s)
            self.act()
        return self

    def act(self) -> Stage:
        """Carry out what the coordinator decides until it rests."""
        for _ in range(50):
            decision = self.decide()
            for name in decision.condemn:
                self.leases[name] = self.leases[name].condemn()
                self.silent.add(name)
                self.coordinator.condemned(name)
            for name in decision.forget:
                self.coordinator.forgotten(name)
            if decision.plan is not None:
                self.plans.append(decision.plan)
                self.coordinator.published(decision.plan, self.now_s)
            elif not decision.condemn and not decision.forget:
                return self
        raise AssertionError(f"the coordinator does not come to rest: {decision.reason}")

    def decide(self) -> Decision:
        """What the coordinator wants now."""
        return self.coordinator.decide(self.now_s)


def running(*incarnations: str, policy: Policy = POLICY) -> Stage:
    """A run whose first world runs on these nodes."""
    stage = Stage(policy).arrives(*incarnations).wait(3 * policy.settle_s + 0.5)
    assert stage.plan.phase is Phase.RUNNING
    return stage.all_run()
