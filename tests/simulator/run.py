"""Run one seed, or many."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from elastic_agent.protocol.budget import LONGEST_PAUSE_S

from .checker import RuleBrokenError
from .cluster import Cluster
from .coordination import KEEP_OVER_LEASES
from .faults import Faults
from .scenario import ANYTHING, Draw, pair_of

MAX_EVENTS = 1_000_000
"""Seeds take some thousands."""


@dataclass(frozen=True)
class Result:
    """How one seed ended."""

    seed: int
    rule: str | None
    """The rule that was broken, or None."""
    what: str
    events: int
    verdict: str
    end: str = ""
    """The verdict with its generation and the charged failures."""
    story: tuple[tuple[float, str, str], ...] = ()


def run_seed(seed: int, draw: Draw = ANYTHING, *, tell: bool = False) -> Result:
    """One universe from its beginning to its end."""
    return run_cluster(Cluster(seed, draw.focus, hosting=draw.hosting, tell=tell), Faults)


def run_cluster(cluster: Cluster, faults: Callable[[Cluster], Faults]) -> Result:
    """Run this universe to its end."""
    rule, what = None, ""
    try:
        _live(cluster, faults)
    except RuleBrokenError as broken:
        rule, what = broken.rule, str(broken)
        cluster.story("checker", "RULE BROKEN: {}", what)
    except Exception as error:
        where = traceback.format_exception(error)[-4:]
        rule, what = f"no exception ({type(error).__name__})", "".join(where)
        cluster.story("checker", "EXCEPTION: {}", what)
    final = cluster.checker.final
    verdict = final.phase.value if final is not None else "none"
    end = (
        f"{verdict}, generation {final.generation}, {final.charged} charged" if final is not None else verdict
    )
    return Result(cluster.seed, rule, what, cluster.kernel.events, verdict, end, tuple(cluster.told or ()))


def _live(cluster: Cluster, faults: Callable[[Cluster], Faults]) -> None:
    faults(cluster)
    kernel, checker, scenario = cluster.kernel, cluster.checker, cluster.scenario

    def after_each_step() -> bool:
        checker.step()
        if kernel.events > MAX_EVENTS:
            checker.broken("liveness (nothing goes round in circles)", f"{MAX_EVENTS} events, and no end")
        return cluster.all_gone()

    kernel.run(scenario.quiet_s, after_each_step)
    checker.watch_liveness()
    kernel.run(scenario.quiet_s + scenario.bound_s + checker.revocations_s(), after_each_step)
    checker.losses_were_noticed()
    checker.second_agents_were_refused()
    patience_s = 12 * scenario.bound_s + scenario.policy.join_timeout_s + 30.0
    patience_s += LONGEST_PAUSE_S * (scenario.policy.max_restarts + 1)
    kernel.run(scenario.quiet_s + patience_s, after_each_step)
    checker.all_is_over()
    if not scenario.again or not cluster.over or checker.forgot:
        return
    kept = cluster.endpoint.machine.disk
    unsettled = scenario.hosting != "etcd" and kept is not None and kept.is_terminal and not kept.settled
    if unsettled or any(machine.disk_is_full for machine in cluster.machines):
        return  # the end of the run is not on disk, so the next one of that name may end with its outcome
    if cluster.goes_on_here:
        cluster.endpoint.may_remove = True
        kernel.run(
            kernel.now + 3 * KEEP_OVER_LEASES * scenario.policy.lease_ttl_s, lambda: cluster.is_removed
        )
        checker.require(cluster.is_removed, "liveness (every run is removed)", "its records are still there")
    cluster.begin_again()
    checker.watch_liveness()
    kernel.run(kernel.now + patience_s, after_each_step)
    checker.all_is_over()


def run_seeds(seeds: Iterable[int], jobs: int, draw: Draw | None = ANYTHING) -> Iterable[Result]:
    """Many universes, in order of their seeds. ``draw``: None for the pair of faults whose turn it is."""
    runner = partial(_run, draw)
    if jobs <= 1:
        yield from map(runner, seeds)
        return
    with get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(runner, seeds, chunksize=16)


def _run(draw: Draw | None, seed: int) -> Result:
    return run_seed(seed, draw if draw is not None else pair_of(seed))


def story_of(result: Result, width: int = 150) -> str:
    """The timeline of a seed that was run with ``tell``, one event per line."""
    lines = []
    for at_s, who, text in result.story:
        lines.append(f"{at_s:9.4f}  {who:<20} {text[:width]}")
    return "\n".join(lines)
