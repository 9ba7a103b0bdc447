"""Real agents and workers under random faults for hours; in the end, everything must be as if there had been none."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from elastic_agent import linux
from elastic_agent.testing import ClusterError, LocalCluster
from elastic_agent.testing.faults import FAULTS, Fault, Injected, choose_node, restart_node
from elastic_agent.testing.mistakes import check_leftovers

from .cluster import C10dCluster, SoakCluster, ThreeMembersCluster
from .counts import Agent, Counts, agent_of, counts, exceeding
from .history import Pause, RecordedRun

BACKENDS: dict[str, type[SoakCluster]] = {"c10d": C10dCluster, "etcd": ThreeMembersCluster}
NODES = 3
GUEST = "guest"
"""The name of the node that joins."""
PACE_S = 0.1
TIMEOUT_S = 120.0
"""How long training may take to continue, and then to include all nodes again: a node that is lost again and again has
to wait, see SETTLE_S."""
SETTLED_S = 60.0
"""How long all counts may take to be what they were in the beginning."""
GAP_S = 1.0
"""The longest time between faults: from the moment at which all nodes train again."""
SECOND_FAULT = 0.25
"""The probability that another fault hits before training has continued."""
LONG_S, CALM_S = 10.0, 62.0
"""If it takes longer until all nodes train again, training is left alone for so long. A generation that runs for a
minute has made progress: no node counts any more as one that is lost again and again, and is admitted late."""
BEFORE_WITNESS = 0.1
"""The part of the time in which every node is hit; after it, the agent of one node is spared and watched."""
WEIGHTS = {
    "worker-killed": 5,
    "worker-killed-saving": 2,
    "worker-stopped": 1,
    "node-killed": 3,
    "node-frozen": 2,
    "partition": 2,
    "join": 2,
    "drain": 2,
    "preempted": 2,
    "store-lost": 3,
    "stop": 1,
}
QUICK = ("worker-killed", "store-lost", "node-killed")
"""Faults that need not wait for anything: those that hit second."""


def _node_frozen(cluster: LocalCluster, rng: random.Random) -> Injected:
    name = choose_node(cluster, rng)
    at_s = linux.boottime_s()
    cluster.agents[name].freeze_node()
    what = f"all processes of {name} stopped, later continued"
    return Injected(what, at_s, name, cluster.agents[name].thaw)


def _partition(cluster: LocalCluster, rng: random.Random) -> Injected:
    assert isinstance(cluster, SoakCluster)
    name = choose_node(cluster, rng)
    at_s = linux.boottime_s()
    cluster.cut_off(name)
    what = f"{name} cut off from the store, later reconnected"
    return Injected(what, at_s, name, lambda: cluster.reconnect(name))


def _preempted(cluster: LocalCluster, rng: random.Random) -> Injected:
    name = choose_node(cluster, rng)
    at_s = linux.boottime_s()
    cluster.agents[name].signal(signal.SIGTERM)
    what = f"SIGTERM to the agent of {name}, later replaced"
    return Injected(what, at_s, name, lambda: restart_node(cluster, name))


SOAK_FAULTS: dict[str, Fault] = {
    **FAULTS,
    "node-frozen": Fault("SIGSTOP to all processes of a node; later continued", _node_frozen),
    "partition": Fault("a node is cut off from the store; later reconnected", _partition),
    "preempted": Fault("SIGTERM to the agent of a node; later replaced", _preempted),
}
"""By name: those of ``elastic-agent chaos``, and others, which only agents can tell from them."""


@dataclass
class Hit:
    """One fault, or two at once."""

    names: list[str]
    what: str
    at_s: float
    """CLOCK_BOOTTIME."""
    recovery_s: float = 0.0
    """Until the next training step."""
    whole_s: float = 0.0
    """Until all nodes trained again, from when the lost node was brought back."""


@dataclass
class Result:
    """What came of it."""

    backend: str
    seed: int
    hits: list[Hit] = field(default_factory=list)
    took_s: float = 0.0
    generations: int = 0
    steps: int = 0
    before: Counts | None = None
    """From when the agent of one node is spared."""
    after: Counts | None = None
    witness: list[Agent] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class SoakTest:
    """One run with faults."""

    def __init__(
        self, backend: str, folder: Path, seed: int, duration_s: float, show: Callable[[str], object]
    ):
        """``folder``: new, for everything that is written. ``show``: gets a line about each fault."""
        self._checkpoints = folder / "checkpoints"
        self._checkpoints.mkdir(parents=True)
        (folder / "cluster").mkdir()
        self.cluster = BACKENDS[backend](folder / "cluster", self._checkpoints, nodes=NODES, pace_s=PACE_S)
        self.result = Result(backend, seed)
        self._folder = folder
        self._duration_s = duration_s
        self._show = show
        self._rng = random.Random(seed)
        self._pauses: list[Pause] = []

    def run(self) -> Result:
        """Inject faults until the time is over, let training end, and check.

        Raises:
            ClusterError: training did not continue; the message tells what happened.
        """
        cluster, started_s = self.cluster, linux.boottime_s()
        with cluster:
            cluster.start_store()
            cluster.start_all()
            self._wait_whole()
            while (now_s := linux.boottime_s() - started_s) < self._duration_s:
                if not cluster.witness and now_s > BEFORE_WITNESS * self._duration_s:
                    cluster.witness = cluster.names[0]
                    self._hit("join")  # what a fourth node leaves belongs to what there was in the beginning
                    self.result.before = self._settled(None)
                self._hit(self._choose())
                if self.result.hits[-1].whole_s > LONG_S:
                    time.sleep(CALM_S)
                self._sample(linux.boottime_s() - started_s)
                time.sleep(self._rng.uniform(0, GAP_S))
            self.result.after = self._settled(self.result.before)
            self.result.took_s = linux.boottime_s() - started_s
            self._end()
        return self.result

    # -- faults ---------------------------------------------------------------------------------

    def _hit(self, name: str) -> None:
        generation = self.cluster.generation
        faults = self._inject_one_or_two(name)
        hit = Hit(
            [*faults],
            "; ".join(fault.what for fault in faults.values()),
            min(fault.at_s for fault in faults.values()),
        )
        if "store-lost" in faults:  # without a store, nothing else can be repaired
            self._repair(faults["store-lost"])
        restarts = any(fault.restarts for fault in faults.values())
        last_s = max(fault.at_s for fault in faults.values())
        hit.recovery_s = self._wait_step(last_s, generation if restarts else -1) - hit.at_s
        for name in reversed(faults):
            if name != "store-lost":
                self._repair(faults[name])
        repaired_s = linux.boottime_s()
        self._wait_whole()
        hit.whole_s = linux.boottime_s() - repaired_s
        self.result.hits.append(hit)
        count = sum(len(earlier.names) for earlier in self.result.hits)
        self._show(
            f"fault {count}: {', '.join(hit.names)}: {hit.what}; next training step after {hit.recovery_s:.1f} s, "
            f"all nodes {hit.whole_s:.1f} s after repair"
        )

    def _inject_one_or_two(self, name: str) -> dict[str, Injected]:
        """By name, in order."""
        try:
            faults = {name: self._inject(name)}
        except ClusterError:  # no worker runs: the store came back, but too late for the leases
            self._wait_whole()
            faults = {name: self._inject(name)}
        if name != "stop" and self._rng.random() < SECOND_FAULT:
            time.sleep(self._rng.uniform(0, 1))
            second = self._rng.choice([fault for fault in QUICK if fault != name])
            self.cluster.lost = {faults[name].without or GUEST, GUEST}  # a guest may not have joined yet
            with contextlib.suppress(ClusterError):  # there is no worker to be killed just now
                faults[second] = self._inject(second)
            self.cluster.lost = set()
        return faults

    def _repair(self, fault: Injected) -> None:
        if fault.repair is not None:
            fault.repair()
        if fault.without is not None and "stopped" in fault.what:
            self._pauses.append(Pause(fault.without, fault.at_s, linux.boottime_s()))

    def _choose(self) -> str:
        weights = {
            name: weight for name, weight in WEIGHTS.items() if name != "stop" or not self.cluster.witness
        }
        return self._rng.choices([*weights], [*weights.values()])[0]

    def _inject(self, name: str) -> Injected:
        own: dict[str, Callable[[LocalCluster, random.Random], Injected]] = {
            "store-lost": self._lose_store,
            "join": self._join,
        }
        fault = Fault("", own[name]) if name in own else SOAK_FAULTS[name]
        injected = fault.inject(self.cluster, self._rng)
        with (self._folder / "faults.log").open("a") as log:
            print(f"{injected.at_s:.3f} {name}: {injected.what}", file=log)
        return injected

    def _lose_store(self, cluster: LocalCluster, rng: random.Random) -> Injected:
        at_s = linux.boottime_s()
        what, repair = self.cluster.lose_store(rng)
        return Injected(what, at_s, None, repair, restarts=False)

    def _join(self, cluster: LocalCluster, rng: random.Random) -> Injected:
        """One more node comes, and is drained later."""
        at_s = linux.boottime_s()
        cluster.start(GUEST)

        def leave() -> None:
            cluster.wait_training(*cluster.names, timeout_s=TIMEOUT_S)
            cluster.names.remove(GUEST)
            cluster.command("drain", GUEST)
            cluster.wait_end(GUEST)

        return Injected(f"{GUEST} joins, later drained", at_s, None, leave, restarts=False)

    # -- waiting --------------------------------------------------------------------------------

    def _wait_step(self, after_s: float, generation: int) -> float:
        """Until a step after this time in a generation above this; when it was."""
        cluster = self.cluster

        def look() -> float | None:
            found = None
            for line in reversed(cluster.records("step")):
                if line["boottime_s"] <= after_s:
                    break
                if line["generation"] > generation:
                    found = float(line["boottime_s"])
            return found

        return cluster.wait("the next training step", look, TIMEOUT_S)

    def _wait_whole(self) -> None:
        """Until every node makes steps from now on, in one generation."""
        cluster = self.cluster
        newest = cluster.course.newest
        number = newest.number if newest else 0
        made = Counter(newest.steps) if newest else Counter[int]()

        def look() -> bool | None:
            now = cluster.course.newest
            if now is None or now.nodes != {*cluster.names} or len(now.steps) != len(cluster.names):
                return None
            more = now.steps if now.number > number else now.steps - made
            return (len(more) == len(cluster.names) and min(more.values()) >= 2) or None

        cluster.wait(f"steps of {', '.join(cluster.names)}", look, TIMEOUT_S)

    # -- counting -------------------------------------------------------------------------------

    def _sample(self, now_s: float) -> None:
        if self.cluster.witness:
            self.result.witness.append(agent_of(self.cluster, self.cluster.witness, now_s))

    def _settled(self, wanted: Counts | None) -> Counts:
        """Return what is used, when that does not shrink any more, or is not more than ``wanted``."""
        ends_s = time.monotonic() + SETTLED_S
        found = counts(self.cluster)
        while time.monotonic() < ends_s:
            time.sleep(3)  # what ends after a membership change has no event to wait for
            now = counts(self.cluster)
            if now.numbers() == found.numbers() if wanted is None else not exceeding(wanted, now):
                return now
            found = now
        return found

    # -- the end --------------------------------------------------------------------------------

    def _end(self) -> None:
        cluster, result = self.cluster, self.result
        cluster.let_finish()
        codes = cluster.wait_end(timeout_s=TIMEOUT_S)
        expected = dict.fromkeys(cluster.names, 0)
        ended = {name: codes[name] for name in cluster.names}
        if ended != expected:
            result.problems.append(f"exit codes at the end: {ended}, expected 0")
        cluster.stop_store()
        left = check_leftovers(cluster)
        if not left.passed:
            result.problems.append(left.text)
        result.generations = len(cluster.course.generations)
        result.steps = cluster.course.position
        result.problems += RecordedRun(cluster, self._pauses).problems()
        if result.before and result.after and (more := exceeding(result.before, result.after)):
            result.problems.append(f"more than in the beginning: {', '.join(more)}")
        (self._folder / "result.json").write_text(json.dumps(asdict(result), indent=1))
