"""What befalls a job of two nodes, and how long every rank of the next world then takes to its first collective."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .figures import import_torch_s
from .launchers import Launcher
from .scene import BOTH, HOST, PEER, THIRD, THREE, NoWorldError, Scene, SpoiltError, World, boottime_s
from .stages import RECOVERY_STAGES, Stages, breakdown

LEASE_S, MARGIN_S, SETTLE_S = 5.0, 1.0, 1.0
LIMIT_S = 60.0
TRIES = 4
CALM_S = 1.5
"""Between two faults of one scene."""
RENEWAL_S = LEASE_S / 3
"""A scene's start and its leases' renewals are in step; a fault is to come at any moment between two renewals."""


@dataclass(frozen=True)
class Fault:
    """``strike`` does the harm and says when (CLOCK_BOOTTIME)."""

    name: str
    strike: Callable[[Scene, World], float]
    nodes_after: tuple[str, ...]
    target_s: float | None = None
    nodes: tuple[str, ...] = BOTH

    @property
    def is_join(self) -> bool:
        return len(self.nodes_after) > len(self.nodes)


@dataclass(frozen=True)
class Recovery:
    """What one fault led to; all in seconds."""

    took_s: float
    """Until the last rank of the new world had its first collective."""
    interruption_s: float
    """How long those nodes that remained had none."""
    stages: Stages = field(default_factory=dict)
    import_torch_s: float | None = None
    """What importing torch took just before, beside the training (measured where a node joins)."""


def kill_worker(scene: Scene, world: World) -> float:
    """The last rank of the larger node, so that (with two workers) a neighbour and another node survive."""
    rank = max(rank for node, rank in world.pids if node == HOST)
    at_s = boottime_s()
    os.kill(world.pids[HOST, rank], signal.SIGKILL)
    return at_s


def kill_and_restart_host(scene: Scene, world: World) -> float:
    at_s = scene.kill_node(HOST)
    scene.start(HOST)
    return at_s


def terminate_agent(scene: Scene, world: World) -> float:
    at_s = boottime_s()
    scene.agents[PEER].signal(signal.SIGTERM)
    return at_s


LOST_TARGET_S = LEASE_S + MARGIN_S + 0.1
WORKER_KILLED = Fault("worker SIGKILL", kill_worker, BOTH, 0.08)
NODE_JOINS = Fault("node joins", lambda scene, world: scene.start(PEER), BOTH, nodes=(HOST,))
ONCE_EACH = (
    Fault("node SIGKILL", lambda scene, world: scene.kill_node(PEER), (HOST,), LOST_TARGET_S),
    Fault("node frozen", lambda scene, world: scene.freeze_node(PEER), (HOST,), LOST_TARGET_S),
    NODE_JOINS,
    Fault("SIGTERM to one agent", terminate_agent, (HOST,)),
    Fault("store host SIGKILL, restarted", kill_and_restart_host, BOTH),
)
"""Those after which a scene is not what it was."""
STORE_LOST = Fault(
    "store host SIGKILL, stays away", lambda scene, world: scene.kill_node(HOST), (PEER, THIRD), nodes=THREE
)


def measure(launcher: Launcher, fault: Fault) -> Recovery | str:
    """One fault in a scene of its own; in words why there was no recovery."""
    why = ""
    for _ in range(TRIES):
        try:
            with Scene(launcher) as scene:
                before = scene.settle_down(fault.nodes)
                time.sleep(random.uniform(0.0, RENEWAL_S))
                _, recovery = strike(scene, fault, before)
                return recovery
        except NoWorldError as error:
            return str(error)
        except SpoiltError as spoilt:
            why = str(spoilt)
    return why


def measure_kills(launcher: Launcher, times: int) -> Iterator[Recovery | str]:
    """Workers killed one after another in one scene; the first that is not recovered from ends it."""
    why = ""
    for _ in range(TRIES):
        try:
            with Scene(launcher) as scene:
                yield from _kill_again_and_again(scene, scene.settle_down(BOTH), times)
                return
        except SpoiltError as spoilt:
            why = str(spoilt)
    yield why


def _kill_again_and_again(scene: Scene, world: World, times: int) -> Iterator[Recovery | str]:
    for _ in range(times):
        time.sleep(CALM_S)
        try:
            world, recovery = strike(scene, WORKER_KILLED, world)
        except NoWorldError as error:
            yield str(error)
            return
        yield recovery


def strike(scene: Scene, fault: Fault, before: World) -> tuple[World, Recovery]:
    """Do the harm and await what comes of it.

    Raises:
        NoWorldError: nothing did.
    """
    import_s = import_torch_s() if fault.is_join else None
    struck_s = fault.strike(scene, before)
    after = scene.await_world(scene.size(fault.nodes_after), struck_s, LIMIT_S)
    journal = scene.journal()
    recovery = Recovery(
        round(after.latest_s("collective") - struck_s, 5),
        round(scene.interruption_s(before, after, set(fault.nodes) & set(fault.nodes_after)), 5),
        breakdown(RECOVERY_STAGES, journal, after, struck_s) if scene.launcher.keeps_journal else {},
        import_s,
    )
    return after, recovery
