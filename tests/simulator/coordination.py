"""The thread that feeds a ``Coordinator`` from the store and does what it decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_agent.protocol.coordinator import Coordinator
from elastic_agent.protocol.records import Lease, Member, Plan, decode, encode
from elastic_agent.protocol.situation import Decision

from .kernel import Inbox, Process, Routine
from .machine import Machine
from .network import Connection, StoreLostError
from .store import Store, Stored, readable

if TYPE_CHECKING:
    from .cluster import Cluster

PATIENCE = 60
"""How many decisions in a row may be acted on before the coordinator must come to rest."""


class Coordination:
    """One coordinator's term (or what it takes for its term)."""

    ends_when_in_doubt = False
    """Whether a write without an answer ends the term; otherwise it is looked what came of it."""

    def __init__(self, cluster: Cluster, machine: Machine, process: Process, store: Store) -> None:
        self.cluster = cluster
        self.machine = machine
        self.process = process
        self.store = store
        self.name = f"coordinator on {machine.name}"
        self.over = False
        """Everybody alive knows the verdict."""
        self.deposed = False
        self.seen: dict[str, tuple[Member, Lease]] = {}
        """What this coordinator was told, kept apart from its own memory for the checker."""
        self._hints = Inbox(cluster.kernel)
        self._connection: Connection | None = None
        self._said = ""
        self._asked_s = machine.clock()
        self._on_time_s = machine.clock()
        """When this thread should have been where it is now."""
        self.core: Coordinator | None = None

    def start(self) -> None:
        """Coordinate in a thread of the process."""
        self.store.listen(self._hints, self.machine)
        self.process.spawn(self._run())

    def _run(self) -> Routine:
        core: Coordinator | None = None
        while not self.over and not self.deposed:
            try:
                if core is None:
                    core = yield from self._begin()
                else:
                    yield from self._read_all(core)
                yield from self._settle(core)
                yield from self._listen(core)
            except StoreLostError:
                yield 0.05
        self.store.unlisten(self._hints)

    def _ask(self, method: str, *args: Any) -> Routine:
        if self._connection is None or self._connection.closed:
            self._connection = self.store.connect(self.machine)
        return (yield from self._connection.call(method, *args, timeout_s=self.cluster.call_s()))

    def _decree(self, method: str, *args: Any) -> Routine:
        """Write, as coordinator."""
        return (yield from self._ask(method, *args))

    def _begin(self) -> Routine:
        core = yield from self._new_core()
        yield from self._read_all(core)
        return core

    def _new_core(self) -> Routine:
        plan = self._plan_in((yield from self._ask("read_plan")))
        return Coordinator(self.machine.clock(), plan, self.machine.disk)

    @staticmethod
    def _plan_in(data: bytes | None) -> Plan | None:
        return decode(Plan, data) if data is not None else None

    def _read_all(self, core: Coordinator) -> Routine:
        if self.seen and "never reads again" in self.cluster.quirks:
            return
        self._asked_s = self.machine.clock()
        yield self.cluster.stumble(self.process)
        data, both = yield from self._ask("read_all")
        if data is not None:
            core.adopt_plan(decode(Plan, data), self.machine.clock())
        self._take_in(core, both)

    def _take_in(self, core: Coordinator, both: dict[str, Stored]) -> None:
        # the time is taken after the answer: what it holds was written before
        now_s = self.machine.clock()
        now_s = self._asked_s if "time before the read" in self.cluster.quirks else now_s
        for incarnation, (member_data, lease_data, written_in) in both.items():
            member, lease = readable(Member, member_data), readable(Lease, lease_data)
            if isinstance(member, Member) and isinstance(lease, Lease) and member.incarnation == incarnation:
                self.seen[incarnation] = (member, lease)
                core.observe(member, lease, now_s, self._written_by(written_in))

    def _written_by(self, revision: int) -> float | None:
        """By when at the latest what carries this revision had been written, if that is known."""
        return None

    def _listen(self, core: Coordinator) -> Routine:
        """Until the next full look, take in what is hinted at."""
        full_s = self.machine.clock() + self.cluster.reread_s
        while not self.deposed:
            wait_s = min(full_s, self._wake_s) - self.machine.clock()
            hint = None
            self._on_time_s = self.machine.clock() + max(wait_s, 0.0)
            if wait_s > 0:
                hint = yield self._hints, self.machine.real_s(wait_s) + 1e-9
            self._on_time_s = min(self._on_time_s, self.machine.clock())
            if hint is not None:
                both = yield from self._ask("read_one", hint)
                self._take_in(core, {hint: both} if both is not None else {})
            if self.machine.clock() >= full_s:
                return
            yield from self._settle(core)

    def _settle(self, core: Coordinator) -> Routine:
        """Decide and act until nothing is left to do."""
        for _ in range(PATIENCE):
            yield from self._excuse_own_pause(core)
            decision = core.decide(self.machine.clock())
            if decision.plan is not None and core.plan is None:
                yield from self._read_all(core)
                decision = core.decide(self.machine.clock())
            self._wake_s = decision.wake_s
            self._tell(decision)
            acted = bool(decision.condemn)
            for incarnation in decision.condemn:
                yield from self._condemn(core, incarnation)
            if decision.plan is not None:
                yield from self._publish(core, decision.plan)
            for incarnation in decision.forget:
                yield from self._decree("forget", incarnation)
                core.forgotten(incarnation)
            if decision.plan is None and not acted:
                if decision.done and core.plan is not None and not self.cluster.may_go_on(core.plan):
                    self.machine.remember(core.plan.history(settled=True))
                    yield from self._clear_away()
                    self.over = True
                    self.cluster.run_over(self)
                    self.deposed = True
                return
        self.cluster.checker.broken("liveness", f"the coordinator does not come to rest: {decision.reason}")

    def _clear_away(self) -> Routine:
        """Everybody alive knows the verdict: remove what is not needed any more."""
        yield from ()

    def _excuse_own_pause(self, core: Coordinator) -> Routine:
        """If this process stood still: judge nobody by that time, nor by what was read before."""
        late_s = self.machine.clock() - self._on_time_s
        if late_s > min(self.cluster.policy.lease_ttl_s / 3, 1.0):
            yield from self._read_all(core)
            core.stood_still(self.machine.clock(), late_s)
        self._on_time_s = self.machine.clock()

    def _tell(self, decision: Decision) -> None:
        if decision.reason != self._said:
            self._said = decision.reason
            self.cluster.story(self.name, "{}", decision.reason)

    def _publish(self, core: Coordinator, plan: Plan) -> Routine:
        data = encode(plan)
        self.cluster.checker.intends(data, plan, self.seen)
        late = "remembers late" in self.cluster.quirks
        if not late:
            self.machine.remember(plan.history())
        yield self.cluster.crash_point("before publishing", self.process)
        try:
            if "blind publish" in self.cluster.quirks:
                yield from self._decree("set_plan", data)
                done = True
            else:
                done = yield from self._decree("publish", plan.version - 1, data)
        except StoreLostError:
            if self.ends_when_in_doubt:
                raise
            done = False
        if done:
            if late:
                yield self.cluster.crash_point("before remembering", self.process)
                self.machine.remember(plan.history())
            core.published(plan, self.machine.clock())
        else:
            newest = yield from self._ask("read_plan")
            if newest is not None:
                core.adopt_plan(decode(Plan, newest), self.machine.clock())
        yield self.cluster.crash_point("after publishing", self.process)

    def _condemn(self, core: Coordinator, incarnation: str) -> Routine:
        member, lease = self.seen[incarnation]
        condemned = lease.condemn()
        self.cluster.checker.condemns(member)
        try:
            done = yield from self._decree("condemn", incarnation, encode(lease), encode(condemned))
        except StoreLostError:
            if self.ends_when_in_doubt:
                raise
            done = False
        if done:
            self.seen[incarnation] = (member, condemned)
            core.condemned(incarnation)
            return
        both = yield from self._ask("read_one", incarnation)
        if both is None:  # removed by somebody else: nobody can renew it any more
            self.seen[incarnation] = (member, condemned)
            core.condemned(incarnation)
        else:
            self._take_in(core, {incarnation: both})
