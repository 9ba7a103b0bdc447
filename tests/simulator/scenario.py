"""What one seed's universe is like: drawn from the seed before anything happens."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import combinations
from random import Random

from elastic_agent.protocol.records import Growth, Policy
from elastic_agent.values import largest_world

from .etcd import LEADER_LEASES

FENCE = (
    "agent freeze",
    "host pause",
    "partition",
    "deaf",
    "slow network",
    "trap",
)
"""What makes leases run out while workers still run."""
STORE = (
    "store crash",
    "store freeze",
    "freeze at reading",
    "crash at publishing",
    "slow disk",
    "full disk",
    "hint loss",
    "join",
)
"""What happens to the store and to the coordinator."""
ETCD = (
    "etcd outage",
    "etcd freeze",
    "etcd data loss",
    "stranger first",
    "office lost",
    "coordinator freeze",
    "coordinator crash",
    "host away",
    "crash at publishing",
    "freeze at reading",
    "slow disk",
    "full disk",
    "broken streams",
    "hint loss",
    "stragglers",
    "join",
)
"""The same where the store is an etcd."""
WORK = (
    "worker fails",
    "worker hangs",
    "early success",
    "start fails",
    "start hangs",
    "stop hangs",
    "unkillable",
    "parks late",
    "does not park",
    "dies parked",
)
"""What workers do."""
CHURN = (
    "agent crash",
    "host crash",
    "flapping",
    "join",
    "drain",
    "impostor",
    "bootstrap unreachable",
    "no port",
    "blackout",
)
"""Who comes and goes."""
NOTICES = ("drain", "drain other", "stop", "asked twice", "signal", "join")
"""Who asks for a notice."""
MISCHIEF = ("garbage", "lossy network", "state lost")
HOSTINGS = ("agent", "serve", "etcd")
FAULTS = tuple(sorted({*FENCE, *STORE, *WORK, *CHURN, *NOTICES, *MISCHIEF}))


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The circumstances: drawn, or as in most directed scenarios. Times are seconds of virtual time."""

    nodes: int
    policy: Policy
    hosting: str
    """Where the store lives: ``agent`` (an agent's process), ``serve`` (a process of its own), or ``etcd`` (every
    agent stands for coordinator, and only the one in office can write)."""
    housemates: bool = False
    """Whether a second agent shares the machine of the endpoint."""
    latency_s: float = 0.002
    hint_loss: float = 0.0
    max_skew: float = 0.0
    kill_max_s: float
    slow_kills: bool = True
    """Whether killing always takes as long as it may."""
    prompt_workers: bool = True
    """Whether workers always end at once on SIGTERM."""
    restart_grace_s: float = 0.1
    drain_grace_s: float = 0.5
    work_s: float = 1000.0
    """How long a world must run undisturbed to finish, while there are faults."""
    patience: float = 0.25
    """For how much of a lease a lane waits for an answer."""
    bursts: bool = False
    """Whether faults come together."""
    faults: tuple[str, ...]
    """The kinds that may occur."""
    fault_count: int = 0
    quiet_s: float
    """When faults stop."""
    again: bool = False
    """Whether everything is started once more under the same name after the run is over."""
    same_store: bool = False
    """Whether that happens in the store in which the run has ended, if it outlives the agents."""
    handles_notices: bool = False
    """Whether the workers look at notices."""
    looks_after_s: float = 0.0
    """How long workers run at most until they begin to look."""
    save_s: float = 0.5
    """How long saving takes at most; sometimes longer than there is time."""
    requeued: bool = False
    """Whether agents of a stopped run are soon started again."""
    last_ask: str | None = None
    """What is asked for when the faults are over."""
    least_lease: float = 1.0
    """For which part of the run's lease some agents ask that come or come back later; 1: all ask for the same."""
    beats: bool = False
    """Whether the workers report heartbeats."""
    survives: bool = False
    """Whether workers park rather than be stopped, where their agents may keep them."""
    warm_up_s: float = 0.0
    """How long it takes at most to start workers apart from any world; 0: they are started in their world."""

    @property
    def store_survives(self) -> bool:
        """Return whether the store outlives its coordinator."""
        return self.hosting == "etcd"

    @property
    def stop_s(self) -> float:
        """The stop deadline that nodes announce."""
        return max(self.restart_grace_s, self.drain_grace_s) + 2 * self.kill_max_s + 0.1

    @property
    def bound_s(self) -> float:
        """Within how long a world must be sealed once the faults are over.

        Where the coordinator is elected, that may take as long as the leader key lives. A lease that no coordinator has
        renewed meanwhile goes on to end: the new one dates it by what it was told before, up to a renewal too late.
        """
        policy = self.policy
        slack = 1.0 + self.max_skew * 2
        promised_s = 2 * policy.lease_ttl_s + policy.fence_margin_s + self.stop_s + 3 * policy.settle_s + 1.0
        promised_s += self.warm_up_s
        if self.hosting == "etcd":
            promised_s += LEADER_LEASES * policy.lease_ttl_s
        return promised_s * slack


def _kinds(random: Random, hosting: str | None) -> list[str]:
    """A few kinds from one or two families, or of everything; now and then none at all."""
    if hosting == "etcd":
        return _kinds_with_etcd(random)
    if random.random() < 0.02:
        return []
    if random.random() < 0.3:
        return random.sample(FAULTS, random.choice((2, 4, 8, len(FAULTS))))
    kinds: list[str] = []
    for family in random.sample((FENCE, FENCE, STORE, WORK, CHURN, NOTICES), random.choice((1, 2))):
        kinds += random.sample(family, random.randint(1, len(family)))
    return kinds


def _kinds_with_etcd(random: Random) -> list[str]:
    """Return what happens to etcd and the office, alone or with one family more."""
    kinds = random.sample(ETCD, random.choice((1, 2, 4, len(ETCD))))
    others = random.choice((None, FENCE, FENCE, WORK, CHURN, NOTICES, MISCHIEF, FAULTS))
    if others is not None:
        kinds += random.sample(others, random.choice((1, 2, len(others))))
    return kinds


def draw(random: Random, focus: Collection[str] = (), hosting: str | None = None) -> Scenario:
    """A scenario; with ``focus``, many faults of these kinds alone; ``hosting``: None to draw that as well."""
    nodes = random.choice((1, 2, 2, 3, 3, 3, 4, 5, 6))
    ttl_s = random.choice((0.6, 1.0, 2.0, 5.0))
    max_skew = random.choice((0.0, 0.01, 0.02))
    margin_s = ttl_s * random.choice((0.15, 0.2, 0.4))
    min_nodes = random.choice((1, random.randint(1, nodes), nodes))
    max_nodes = max(min_nodes, nodes + random.choice((-1, 0, 0, 1)))
    kinds = list(focus) or _kinds(random, hosting)
    policy = Policy(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        max_restarts=random.choice((0, 1, 2, 3, 10, 10)),
        lease_ttl_s=ttl_s,
        fence_margin_s=margin_s,
        settle_s=random.choice((0.1, 0.5, 1.0)),
        join_timeout_s=random.choice((5.0, 20.0, 60.0)),
        start_timeout_s=random.choice((2.0, 10.0)),
        grow=random.choice((Growth.AFTER, Growth.AFTER, Growth.AT_NOTICE, Growth.NEVER)),
        notice_s=random.choice((1.0, 5.0, 20.0)),
        node_counts=_node_counts(random, min_nodes, max_nodes),
        restart_window_s=random.choice((0.0, 1.0, 5.0, 30.0, 3600.0)),
    )
    survives = random.random() < 0.5
    return Scenario(
        nodes=nodes,
        policy=policy,
        hosting=hosting or random.choice(("agent", "serve")),
        housemates=random.random() < 0.25,
        latency_s=ttl_s * random.choice((0.0005, 0.002, 0.01)),
        hint_loss=random.choice((0.0, 0.1, 0.5)),
        max_skew=max_skew,
        kill_max_s=0.95 * (margin_s / (1 + max_skew) - 2.1 * max_skew * ttl_s),
        slow_kills=random.random() < 0.5,
        prompt_workers=random.random() < 0.5,
        restart_grace_s=random.choice((0.1, 0.5)),
        drain_grace_s=random.choice((0.5, 2.0)),
        work_s=random.choice((3.0, 20.0, 1000.0, 1000.0)),
        patience=random.choice((0.25, 0.25, 1.0)),
        bursts=random.random() < 0.5,
        faults=tuple(sorted(set(kinds))),
        fault_count=random.choice((20, 40) if focus else (2, 8, 20, 40)) if kinds else 0,
        quiet_s=ttl_s * random.choice((8, 15, 30)) + 2.0,
        again=random.random() < 0.1,
        same_store=random.random() < 0.5,
        handles_notices=random.random() < 0.6,
        looks_after_s=random.choice((0.0, 0.1, 3.0)),
        save_s=random.choice((0.1, 0.5, 3.0)),
        requeued=random.random() < 0.5,
        last_ask=random.choice((None, None, None, "stop", "drain", "drain other")),
        least_lease=random.choice((1.0, 1.0, 1.0, 0.4)),
        beats=random.random() < 0.5,
        survives=survives,
        warm_up_s=random.choice((0.0, 0.3, 3.0)) if survives else 0.0,
    )


def _node_counts(random: Random, low: int, high: int) -> tuple[int, ...]:
    """Now and then only some sizes are allowed."""
    counts = random.choice((*((),) * 6, (2,), (3,), (1, 2, 4)))
    return counts if largest_world(high, low, high, counts) else ()


# -- pairs of kinds of faults: rare ones hide in a mixture of many ------------------------------------

ONLY_ETCD = frozenset(ETCD) - frozenset(FAULTS)
ONLY_C10D = frozenset({"store crash", "store freeze", "state lost"})


@dataclass(frozen=True)
class Draw:
    """What of a scenario is given rather than drawn from the seed."""

    focus: tuple[str, ...] = ()
    """The only kinds of faults; none: drawn."""
    hosting: str | None = None
    """Where the store lives; None: drawn."""


ANYTHING = Draw()


def _pairs() -> list[Draw]:
    kinds = sorted({*FAULTS, *ETCD})
    draws = []
    for hosting in HOSTINGS:
        barred = ONLY_C10D if hosting == "etcd" else ONLY_ETCD
        allowed = [kind for kind in kinds if kind not in barred]
        draws += [Draw(pair, hosting) for pair in combinations(allowed, 2)]
    return draws


PAIRS = _pairs()
"""Every pair of kinds that can occur together, with every place where the store may live."""

STRIDE = 997
"""Prime, and no divisor of the number of pairs: consecutive seeds draw very different pairs, all in turn."""


def pair_of(seed: int) -> Draw:
    """The pair that this seed draws; in ``len(PAIRS)`` consecutive seeds every one occurs once."""
    return PAIRS[seed * STRIDE % len(PAIRS)]
