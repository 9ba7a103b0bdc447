"""Run one seed, or many."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import get_context

from . import mutants, seeded_mutants
from .checker import RuleBrokenError
from .cluster import Cluster
from .coordination import KEEP_OVER_LEASES
from .faults import Faults
from .mutants import Mutant, applied
from .pairs import ANYTHING, Draw, pair_of
from .seeded_mutants import SeededMutant

ALL_MUTANTS: dict[str, Mutant] = {**mutants.MUTANTS, **seeded_mutants.MUTANTS}

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


def run_seed(seed: int, mutant: Mutant | None = None, draw: Draw = ANYTHING, *, tell: bool = False) -> Result:
    """One universe from its beginning to its end. A mutant's own focus and hosting count if ``draw`` has none."""
    if isinstance(mutant, SeededMutant):
        draw = Draw(draw.focus or mutant.focus, draw.hosting or mutant.hosting)
    with applied(mutant) as quirks:
        cluster = Cluster(seed, quirks, draw.focus, hosting=draw.hosting, tell=tell)
        return run_cluster(cluster, Faults, strict=mutant is not None)


def run_cluster(cluster: Cluster, faults: Callable[[Cluster], Faults], *, strict: bool) -> Result:
    """Run this universe to its end. ``strict``: raise errors of a mutant that no longer fits the code."""
    rule, what = None, ""
    try:
        _live(cluster, faults)
    except RuleBrokenError as broken:
        rule, what = broken.rule, str(broken)
        cluster.story("checker", "RULE BROKEN: {}", what)
    except Exception as error:
        if strict and isinstance(error, AttributeError | NameError | TypeError):
            raise
        where = traceback.format_exception(error)[-4:]
        rule, what = f"no exception ({type(error).__name__})", "".join(where)
        cluster.story("checker", "EXCEPTION: {}", what)
    final = cluster.checker.final
    verdict = final.phase.value if final is not None else "none"
    end = (
        f"{verdict}, generation {final.generation}, {final.charged} charged" if final is not None else verdict
    )
    return Result(cluster.seed, rule, what, cluster.kernel.events, verdict, end, tuple(cluster.told or ()))


def catch(mutant: SeededMutant) -> Result | None:
    """The first seed in which a rule shows the bug; None if no seed does that it may take."""
    results = (run_seed(seed, mutant) for seed in range(mutant.first, mutant.first + mutant.seeds))
    return next((result for result in results if result.rule is not None), None)


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
    patience_s += scenario.policy.restart_backoff_s * (scenario.policy.max_restarts + 1)
    kernel.run(scenario.quiet_s + patience_s, after_each_step)
    checker.all_is_over()
    if not scenario.again or not cluster.over or checker.forgot:
        return
    kept = cluster.endpoint.machine.disk
    unsettled = (
        scenario.hosting != "etcd" and kept is not None and kept.outcome is not None and not kept.settled
    )
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


def run_seeds(
    seeds: Iterable[int], jobs: int, mutant: Mutant | None = None, draw: Draw | None = ANYTHING
) -> Iterable[Result]:
    """Many universes, in order of their seeds. ``draw``: None for the pair of faults whose turn it is."""
    runner = _Runner(mutant.name if mutant is not None else None, draw)
    if jobs <= 1:
        yield from map(runner, seeds)
        return
    with get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(runner, seeds, chunksize=16)


@dataclass(frozen=True)
class _Runner:
    mutant: str | None
    """By name: the mutants themselves cannot be sent to another process."""
    draw: Draw | None

    def __call__(self, seed: int) -> Result:
        mutant = ALL_MUTANTS[self.mutant] if self.mutant is not None else None
        return run_seed(seed, mutant, self.draw if self.draw is not None else pair_of(seed))


def story_of(result: Result, width: int = 150) -> str:
    """The timeline of a seed that was run with ``tell``, one event per line."""
    lines = []
    for at_s, who, text in result.story:
        lines.append(f"{at_s:9.4f}  {who:<20} {text[:width]}")
    return "\n".join(lines)


def stopwatch() -> float:
    """Real time, for the report of seeds per minute."""
    return time.monotonic()
