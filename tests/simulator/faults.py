"""What goes wrong, and when: drawn from the seed, carried out on the cluster, healed before the quiet."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from elastic_agent.protocol.records import Cause, Failure, FailureKind, Phase
from tests.protocol.support import on_disk

from .agent import Agent
from .cluster import Cluster, Seatholder
from .etcd import Etcd
from .guard import Group
from .kernel import Process
from .notice_rules import UNWELL_S


class Faults:
    """The bad luck of one seed."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.kernel = cluster.kernel
        self.random = cluster.kernel.random
        self._undo: list[Callable[[], None]] = []
        self._victim: Seatholder | None = None
        cluster.faults = self
        self._plan_strikes()
        self.kernel.after(cluster.scenario.quiet_s, self.calm_down)

    def _plan_strikes(self) -> None:
        """Alone, or in bursts: what breaks protocols is the second fault while the first is handled."""
        scenario, random = self.cluster.scenario, self.random
        left = scenario.fault_count
        while left > 0:
            at_s = random.uniform(0.0, scenario.quiet_s * 0.9)
            burst = random.randint(1, 5) if scenario.bursts else 1
            victim = random.choice((None, random.choice(self.cluster.holders)))
            for _ in range(min(burst, left)):
                self.kernel.after(at_s, self._strike, random.choice(scenario.faults), victim)
                at_s += random.choice((0.0, 0.1, 1.0)) * random.random() * scenario.policy.lease_ttl_s
            left -= burst

    def _strike(self, kind: str, victim: Seatholder | None) -> None:
        if self.cluster.over or self.cluster.calm:
            return
        self.cluster.trouble()
        self._victim = victim
        getattr(self, "_" + kind.replace(" ", "_"))()
        self._victim = None

    def _some(self) -> Seatholder:
        """The one that is meant, or any."""
        return self._victim or self.random.choice(self.cluster.holders)

    def _trap(self) -> None:
        """Let something go wrong at the very moment that a node gets to some point."""
        points = ("announce", "prepare", "start", "stop", "rejoin", "renewal sent", "renewed", "plan read")
        points += ("request", "notice", "yield")
        kinds = ("agent crash", "agent freeze", "host pause", "partition", "deaf", "drain", "slow network")
        self.cluster.traps.append((self.random.choice(points), self.random.choice(kinds), self._victim))

    def spring(self, kind: str, victim: Seatholder | None) -> None:
        """A node walked into a trap."""
        assert victim is not None, "no trap waits for a coordinator"
        self.cluster.story(victim.node_id, "walks into a trap: {}", kind)
        self.kernel.after(0.0, self._strike, kind, victim)

    def _for_a_while(self, undo: Callable[[], None]) -> None:
        """Undo this after a while, at the latest when the faults are over."""
        ttl_s = self.cluster.policy.lease_ttl_s
        wait_s = ttl_s * self.random.choice((0.3, 1.0, 1.3, 2.0, 3.0)) * self.random.uniform(0.6, 1.1)
        self._undo_after(wait_s, undo)

    def _undo_after(self, wait_s: float, undo: Callable[[], None]) -> None:
        done: list[bool] = []
        self.cluster.ongoing += 1

        def once() -> None:
            if not done:
                done.append(True)
                self.cluster.ongoing -= 1
                self.cluster.trouble()
                undo()

        self._undo.append(once)
        self.kernel.after(wait_s, once)

    def calm_down(self) -> None:
        """The faults are over."""
        cluster = self.cluster
        cluster.story("faults", "are over")
        cluster.calm = True
        cluster.trouble()
        for undo in self._undo:
            undo()
        cluster.armed = None
        cluster.traps.clear()
        cluster.network.loss = cluster.network.stray = 0.0
        cluster.network.slow_s.clear()
        cluster.unreachable.clear()
        if cluster.endpoint.store is not None:
            cluster.endpoint.store.hint_loss = 0.0
        for holder in cluster.holders:
            holder.recover()
        self.kernel.after(0.0, self._bring_back)  # after what the thaws bring about
        cluster.job.hurry()
        if cluster.scenario.last_ask is not None:
            self.kernel.after(self.random.uniform(4.0, 9.0), self._ask_last)

    def _ask_last(self) -> None:
        """Nothing else goes wrong any more: what is asked for now must come true in time."""
        agent = self._present()
        if self.cluster.over or agent is None:
            return
        self._victim = agent.holder
        getattr(self, "_" + str(self.cluster.scenario.last_ask).replace(" ", "_"))()
        self._victim = None

    def _present(self) -> Agent | None:
        agents = [holder.agent for holder in self.cluster.healthy() if holder.agent is not None]
        return self.random.choice(agents) if agents else None

    def _bring_back(self) -> None:
        """Start again whatever is down, but for what was meant to leave."""
        cluster = self.cluster
        for holder in cluster.holders:
            if not holder.machine.up:
                holder.machine.boot()
            if (holder.may_restart and holder.wanted) or holder.machine is cluster.endpoint.machine:
                self._restart_unless_departed(holder)
        if cluster.scenario.hosting in ("serve", "etcd"):
            cluster.endpoint.machine.boot()
            cluster.serve()

    def _restart_unless_departed(self, holder: Seatholder) -> None:
        agent = holder.agent
        if agent is None or (not agent.process.alive and agent not in self.cluster.gone):
            if agent is not None:
                holder.wanted = True
            self.cluster.start(holder)

    def _restart_s(self) -> float | None:
        return self.random.choice((None, 0.1, 0.5, 2.0, 6.0))

    # -- agents and hosts -----------------------------------------------------------------------

    def _agent_crash(self) -> None:
        self.cluster.crash_agent(self._some(), self._restart_s())

    def _flapping(self) -> None:
        """The agent dies and comes back, again and again, until the faults are over."""
        holder = self._some()
        period_s = self.random.choice((0.5, 2.0)) * self.cluster.policy.lease_ttl_s

        def flap() -> None:
            if not self.cluster.calm and not self.cluster.over:
                self.cluster.crash_agent(holder, 0.2)
                self.kernel.after(period_s * self.random.uniform(0.5, 1.5), flap)

        flap()

    def _agent_freeze(self) -> None:
        agent = self._some().agent
        if agent is not None and agent.process.alive:
            self.cluster.story(agent.name, "freezes")
            agent.process.freeze()

            def thaw() -> None:
                self.cluster.story(agent.name, "thaws")
                agent.process.thaw()

            self._for_a_while(thaw)

    def _host_pause(self) -> None:
        machine = self._some().machine
        self.cluster.story(machine.name, "pauses as a whole")
        machine.pause()

        def resume() -> None:
            self.cluster.story(machine.name, "resumes")
            machine.resume()

        self._for_a_while(resume)

    def _host_crash(self) -> None:
        machine = self._some().machine
        self.cluster.story(machine.name, "loses power")
        machine.crash()
        restart_s = self._restart_s()
        if restart_s is not None:
            self.kernel.after(restart_s, self._boot, machine)

    def _host_away(self) -> None:
        """A machine is down for longer than etcd keeps what its node wrote."""
        store, machine = self._etcd(), self._some().machine
        if store is not None:
            self.cluster.story(machine.name, "loses power for long")
            machine.crash()
            self.kernel.after(store.kept_s * self.random.uniform(1.0, 1.5), self._boot, machine)

    def _boot(self, machine: object) -> None:
        for holder in self.cluster.holders:
            if holder.machine is machine and not self.cluster.over:
                holder.machine.boot()
                self._restart_unless_departed(holder)

    def _blackout(self) -> None:
        """Every process of the run dies; all are started again, one after the other."""
        cluster = self.cluster
        cluster.story("faults", "everything is killed")
        for holder in cluster.holders:
            again_s = self.random.choice((0.1, 0.5, 3.0)) * (0.5 + self.random.random())
            cluster.crash_agent(holder, again_s if holder.wanted else None)
        if cluster.scenario.hosting == "serve" and cluster.endpoint.host is not None:
            cluster.endpoint.host.kill()
            self.kernel.after(self.random.choice((0.05, 0.5, 6.0)), cluster.serve)

    # -- network --------------------------------------------------------------------------------

    def _partition(self) -> None:
        name = self._some().machine.name
        self.cluster.story(name, "is cut off from the store")
        self.cluster.network.cut.add(name)
        self._heal_later(name)

    def _deaf(self) -> None:
        name = self._some().machine.name
        self.cluster.story(name, "does not hear the store's answers")
        self.cluster.network.deaf.add(name)
        self._heal_later(name)

    def _heal_later(self, name: str) -> None:
        def heal() -> None:
            self.cluster.story(name, "reaches the store again")
            self.cluster.network.heal(name)

        self._for_a_while(heal)

    def _slow_network(self) -> None:
        name = self._some().machine.name
        ttl_s = self.cluster.policy.lease_ttl_s
        way = self.random.choice(("requests", "answers"))
        self.cluster.network.slow_s[name, way] = ttl_s * self.random.choice((0.05, 0.2, 0.6, 1.0))
        self._for_a_while(partial(self.cluster.network.slow_s.pop, (name, way), None))

    def _lossy_network(self) -> None:
        self.cluster.network.loss = self.random.choice((0.01, 0.1))
        self._for_a_while(partial(setattr, self.cluster.network, "loss", 0.0))

    # -- workers --------------------------------------------------------------------------------

    def _worker_fails(self) -> None:
        self._hit_a_group(FailureKind.WORKER, "exit code 1")

    def _worker_hangs(self) -> None:
        self._hit_a_group(FailureKind.HANG, "no progress")

    def _hit_a_group(self, kind: FailureKind, words: str) -> None:
        groups = self._groups()
        if groups:
            group = self.random.choice(groups)
            hangs = kind is FailureKind.HANG
            failure = Failure(
                kind,
                f"{group.agent.name}: {words}",
                signature="" if hangs else self.random.choice(("", "e1", "e2")),
                stalled_s=self.random.choice((0.0, 0.5, 10.0)) if hangs else 0.0,
            )
            group.agent.guard.process.do(self.cluster.job.fail, group, failure)

    def _early_success(self) -> None:
        groups = self._groups()
        if groups:
            group = self.random.choice(groups)
            group.agent.guard.process.do(self.cluster.job.succeed, group)

    def _groups(self) -> list[Group]:
        return [group for group in self.cluster.checker.live if not group.dying and group.started]

    def _start_fails(self) -> None:
        self._some().failing_starts += self.random.choice((2, 4, 100))

    def _start_hangs(self) -> None:
        self._some().hanging_starts += self.random.choice((2, 4))

    def _stop_hangs(self) -> None:
        self._some().hanging_stops += 2

    def _parks_late(self) -> None:
        self._some().parking_s = self.random.uniform(0.3, 0.99)

    def _does_not_park(self) -> None:
        self._some().parking_s = float("inf")

    def _dies_parked(self) -> None:
        agent = self._some().agent
        if agent is not None:
            agent.guard.process.do(agent.guard.parked_ends)

    def _unkillable(self) -> None:
        self._some().unkillable_stops += 1

    def _bootstrap_unreachable(self) -> None:
        holders = self.cluster.holders
        pair = (self.random.choice(holders).machine.name, self.random.choice(holders).node_id)
        self.cluster.unreachable.add(pair)
        self._for_a_while(lambda: self.cluster.unreachable.discard(pair))

    def _no_port(self) -> None:
        """A node, or every node, can offer no bootstrap store for a while."""
        everywhere = self.random.random() < 0.5
        holders = list(self.cluster.holders) if everywhere else [self._some()]
        for holder in holders:
            self.cluster.story(holder.node_id, "has no port for a bootstrap store")
            holder.portless = True

        def heal() -> None:
            for holder in holders:
                holder.portless = False

        self._for_a_while(heal)

    # -- membership -----------------------------------------------------------------------------

    def _join(self) -> None:
        index = len(self.cluster.holders) + 1
        if index < 10:
            self.cluster.add_node(self.cluster.machine_for(index), f"n{index}")

    def _drain(self) -> None:
        holder = self._some()
        agent = holder.agent
        if agent is not None and agent.process.alive and agent.outcome is None:
            self.cluster.story(agent.name, "is drained")
            holder.wanted = False
            in_good_order = self.random.random() < 0.5
            agent.process.do(agent.asking.drain if in_good_order else agent.asking.drain_at_once)

    def _drain_in_good_order(self, holder: Seatholder) -> None:
        agent = holder.agent
        if agent is not None and agent.process.alive and agent.outcome is None:
            self.cluster.story(agent.name, "is drained, as all are")
            holder.wanted = False
            agent.process.do(agent.asking.drain)

    def _asker(self) -> Agent | None:
        agent = self._some().agent
        return agent if agent is not None and agent.process.alive and agent.outcome is None else None

    def _drain_other(self) -> None:
        """A user at one node wants another to leave."""
        asker, holder = self._asker(), self.random.choice(self.cluster.holders)
        if asker is None:
            return
        self.cluster.story(asker.name, "is to drain {}", holder.node_id)
        for other in self.cluster.holders:
            other.wanted &= other.node_id != holder.node_id
        self.cluster.told_to_leave.add(holder.node_id)
        left_s = self.random.choice((0.3, 2.0, 10.0))
        asker.process.do(asker.asking.drain_other, holder.node_id, left_s)

    def _stop(self) -> None:
        """The scheduler, or a person, wants the whole run to end."""
        asker = self._asker()
        if asker is None:
            return
        self.cluster.story(asker.name, "is to stop the run")
        cause = self.random.choice((Cause.PREEMPTED, Cause.WALLTIME, Cause.OPERATOR))
        left_s = self.random.choice((0.0, 0.3, 2.0, 10.0, 40.0))
        asker.process.do(asker.asking.stop, cause, left_s)

    def _signal(self) -> None:
        """A signal reaches an agent and its workers; the agent learns a little later what it asks for, if anything."""
        agent = self._asker()
        if agent is None:
            return
        self.cluster.story(agent.name, "receives a signal, as its workers do")
        if agent.guard.group is not None:
            agent.guard.process.do(self.cluster.job.interrupt, agent.guard.group)
        request = self.random.choice((agent.asking.drain, self._preempted(agent), None))
        if request is not None:
            agent.holder.wanted &= request != agent.asking.drain
            self.kernel.after(self.random.choice((0.0, 0.1, 3.0)), agent.process.do, request)

    @staticmethod
    def _preempted(agent: Agent) -> Callable[[], None]:
        return lambda: agent.asking.stop(Cause.PREEMPTED, 2.0)

    def _asked_twice(self) -> None:
        """Several people want something at once, or all nodes are asked to leave."""
        if self.random.random() < 0.3:
            calm_s = 2.0 * UNWELL_S + 2.0 * self.cluster.policy.lease_ttl_s
            for holder in self.cluster.holders:
                self.kernel.after(calm_s + 0.5 * self.random.random(), self._drain_in_good_order, holder)
            return
        for _ in range(self.random.randint(2, 3)):
            self._victim = self.random.choice((None, self._victim))
            self.random.choice((self._drain, self._drain_other, self._stop))()

    def _impostor(self) -> None:
        """A second agent with the explicit id of another."""
        index = len(self.cluster.holders) + 1
        if index < 10:
            self.cluster.add_node(self.cluster.machine_for(index), self._some().node_id, impostor=True)

    # -- the store and its coordinator ----------------------------------------------------------

    def _store_crash(self) -> None:
        cluster, endpoint = self.cluster, self.cluster.endpoint
        if cluster.scenario.store_survives or not endpoint.serving:
            return
        if cluster.scenario.hosting == "serve":
            assert endpoint.host is not None
            cluster.story("serve", "is killed")
            endpoint.host.kill()
            self.kernel.after(self.random.choice((0.05, 0.5, 6.0)), cluster.serve)
            return
        for holder in cluster.holders:
            if holder.agent is not None and holder.agent.process is endpoint.host:
                cluster.crash_agent(holder, self.random.choice((0.05, 0.5, 6.0)))

    def _store_freeze(self) -> None:
        host = self.cluster.endpoint.host
        if host is not None and host.alive:
            self.cluster.story(host.name, "freezes")
            self.freeze(host)

    def _etcd_freeze(self) -> None:
        """etcd has no leader of its own for a while: what was asked is done late."""
        self._store_freeze()

    def _etcd_outage(self) -> None:
        """etcd gives no answers for a while."""
        store = self._etcd()
        if store is None or store.down:
            return
        self.cluster.story("etcd", "is down")
        store.fail()

        def back() -> None:
            self.cluster.story("etcd", "is back")
            store.down = False

        self._for_a_while(back)

    def _etcd_data_loss(self) -> None:
        """Rarely: a user deletes etcd's data."""
        store = self._etcd()
        if store is None or self.random.random() > 0.2:
            return
        self.cluster.story("etcd", "loses all its data")
        store.process.kill()
        self.kernel.after(self.random.choice((0.05, 0.5, 6.0)), self.cluster.serve)

    def _stranger_first(self) -> None:
        """etcd loses its data, and while the nodes of the run are slow to dial again, another one is elected.

        Its disk says nothing of the run, or something of an earlier run of that name. The others come back while it
        waits for them, or when it has formed a world of its own.
        """
        cluster, store = self.cluster, self._etcd()
        index = len(cluster.holders) + 1
        unknown = cluster.checker.newest_history is None or cluster.checker.final is not None
        if store is None or unknown or index >= 10 or cluster.scenario.least_lease < 1.0:
            return
        self._cut_off_all()
        cluster.story("etcd", "loses all its data, and the nodes are slow to dial again")
        cluster.endpoint.may_forget = True
        store.process.kill()
        cluster.serve()
        machine = cluster.machine_for(index)
        if self.random.random() < 0.3:
            machine.disk = on_disk(900, outcome=Phase.FINISHED, settled=True)
        cluster.start(cluster.add_node(machine, f"n{index}"))

    def _cut_off_all(self) -> None:
        """Nodes are slow to dial a new store: some come while it waits for them, or all when a world has formed."""
        cluster, policy = self.cluster, self.cluster.policy
        alone_s = policy.lease_ttl_s + policy.fence_margin_s + policy.settle_s
        least, most, unit_s = self.random.choice(((0.3, 1.3, policy.lease_ttl_s), (1.0, 2.0, alone_s)))
        for machine in cluster.machines:
            cluster.network.cut.add(machine.name)
            wait_s = min(unit_s * self.random.uniform(least, most), 0.8 * policy.join_timeout_s)
            self._undo_after(wait_s, partial(cluster.network.heal, machine.name))

    def _state_lost(self) -> None:
        """Rarely: the machine of the endpoint loses its disk, and the store with it."""
        cluster, checker = self.cluster, self.cluster.checker
        unknown = checker.newest_history is None or checker.final is not None
        if cluster.scenario.store_survives or unknown or self.random.random() > 0.3:
            return
        cluster.story(cluster.endpoint.machine.name, "loses its disk")
        cluster.endpoint.machine.disk = None
        if self.random.random() < 0.5:
            self._cut_off_all()
        self._store_crash()

    def _etcd(self) -> Etcd | None:
        store = self.cluster.endpoint.store
        return store if isinstance(store, Etcd) and store.process.alive else None

    def _office_lost(self) -> None:
        """The leader key vanishes under its holder."""
        store = self._etcd()
        if store is not None:
            store.vacate("is lost")

    def _is_leader(self) -> Agent | None:
        for holder in self.cluster.holders:
            agent = holder.agent
            if agent is not None and agent.election is not None and agent.election.leads:
                return agent
        return None

    def _coordinator_freeze(self) -> None:
        """The agent in office stands still, with whatever it had under way."""
        agent = self._is_leader()
        if agent is not None:
            self.cluster.story(agent.name, "freezes in office")
            self.freeze(agent.process)

    def _coordinator_crash(self) -> None:
        agent = self._is_leader()
        if agent is not None:
            self.cluster.crash_agent(agent.holder, self._restart_s())

    def _broken_streams(self) -> None:
        """Every watch and every request under way ends without an answer."""
        store = self._etcd()
        if store is not None:
            store.break_streams()

    def _stragglers(self) -> None:
        """Single requests and answers take so long that others overtake them."""
        network = self.cluster.network
        network.stray = self.random.choice((0.02, 0.2))
        self._for_a_while(partial(setattr, network, "stray", 0.0))

    def _freeze_at_reading(self) -> None:
        self.cluster.armed = (self.random.choice(("read", "read_leases", "store request")), "freeze")

    def freeze(self, process: Process) -> None:
        """Let a process stand still for a while."""
        process.freeze()
        self._for_a_while(process.thaw)

    def _crash_at_publishing(self) -> None:
        point = self.random.choice(("save", "publish", "store request", "published"))
        self.cluster.armed = (point, "die")

    def _slow_disk(self) -> None:
        """Some writes take long; one that waits for them may take longer than a coordinator waits for it."""
        cluster = self.cluster
        machine = self._some().machine if cluster.scenario.store_survives else cluster.endpoint.machine
        cluster.story(machine.name, "has a slow disk")
        machine.disk_takes_s = self.random.choice((0.05, 0.3, 0.9))
        self._for_a_while(partial(setattr, machine, "disk_takes_s", 0.0))

    def _full_disk(self) -> None:
        """Nothing can be written to the disk of the coordinator's machine, or of another one."""
        machine = self.random.choice((self.cluster.endpoint.machine, self._some().machine))
        self.cluster.story(machine.name, "has a full disk")
        machine.disk_is_full = True
        self._for_a_while(partial(setattr, machine, "disk_is_full", False))

    def _hint_loss(self) -> None:
        if self.cluster.endpoint.store is not None:
            self.cluster.endpoint.store.hint_loss = 1.0

    def _garbage(self) -> None:
        """A client writes nonsense into the store."""
        store = self.cluster.endpoint.store
        if store is not None:
            name = f"garbage{self.random.randrange(1000)}"
            nonsense = self.random.choice((b"\x80\x04]", b"{}", b'{"version":2}', b"[" * 5000, b""))
            lease = self.random.choice((nonsense, b'{"incarnation":"x","ttl_s":1}'))
            store.scribble(name, nonsense, lease)
