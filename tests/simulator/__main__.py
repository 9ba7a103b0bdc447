"""``python -m tests.simulator``: run seeds or directed scenarios, tell the story of one."""

from __future__ import annotations

import argparse
import gc
import logging
import shlex
import sys
from collections import Counter
from multiprocessing import get_context

import structlog

from . import seeded_mutants
from .cluster import Cluster
from .mutants import Mutant
from .pairs import Draw, pair_of
from .run import ALL_MUTANTS, Result, catch, run_seed, run_seeds, stopwatch, story_of
from .scenario import ETCD, FAULTS, HOSTINGS
from .scenarios import SCENARIOS


def argument_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many seeds to run")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this seed alone")
    parser.add_argument("--story", action="store_true", help="tell what happened (with --seed or --scenario)")
    parser.add_argument("--jobs", type=int, default=2, help="processes to use")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), help="run this directed scenario alone")
    parser.add_argument(
        "--mutant",
        choices=sorted(ALL_MUTANTS),
        help="run with this deliberate bug: the seeds, or the scenario if one is given",
    )
    parser.add_argument(
        "--mutants",
        action="store_true",
        help="list which directed scenario, or which seed, detects each deliberate bug, and by which rule",
    )
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first broken rule")
    parser.add_argument("--focus", type=_kinds, default=(), help="only these faults, separated by commas")
    parser.add_argument("--hosting", choices=HOSTINGS, help="where the store lives; without it, drawn")
    parser.add_argument(
        "--pairs", action="store_true", help="each seed draws one pair of kinds of faults in turn"
    )
    return parser


def main() -> int:
    """Exit code 0: no rule was broken; 1: one was."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))  # sessions warn
    options = argument_parser().parse_args()
    gc.freeze()  # collections that look through all that is imported take a quarter of the time
    if options.mutants:
        return _all_mutants(options.jobs)
    mutant = ALL_MUTANTS[options.mutant] if options.mutant else None
    if options.scenario:
        return _directed(options.scenario, options.mutant, options.story)
    draw = None if options.pairs else Draw(options.focus, options.hosting)
    if options.seed is not None:
        return _one(options.seed, mutant, draw or pair_of(options.seed), options.story)
    return _many(options, mutant, draw)


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(kind.strip() for kind in text.split(","))
    unknown = sorted({*kinds} - {*FAULTS, *ETCD})
    if unknown:
        known = ", ".join(sorted({*FAULTS, *ETCD}))
        raise argparse.ArgumentTypeError(f"no faults: {', '.join(unknown)}; there are {known}")
    return kinds


def _flags(mutant: Mutant | None, draw: Draw) -> str:
    """What the command line needs beside the seed to run the same universe again."""
    given = {
        "--mutant": mutant.name if mutant else "",
        "--focus": ",".join(draw.focus),
        "--hosting": draw.hosting or "",
    }
    return "".join(f" {flag} {shlex.quote(value)}" for flag, value in given.items() if value)


def _one(seed: int, mutant: Mutant | None, draw: Draw, story: bool) -> int:
    result = run_seed(seed, mutant, draw, tell=story)
    if story:
        print(Cluster(seed, focus=draw.focus, hosting=draw.hosting).scenario)
        print(story_of(result))
    print(f"seed {seed}: {result.what or 'every rule held'} ({result.events} events, {result.verdict})")
    return 1 if result.rule else 0


def _directed(name: str, mutant: str | None, story: bool) -> int:
    scenario = SCENARIOS[name]
    result = scenario.run(mutant, tell=story)
    if story:
        print(story_of(result))
    print(f"{name}: {result.what or 'every rule held'} ({result.end}; expected: {scenario.end})")
    return 0 if result.rule is None and result.end == scenario.end else 1


def _all_mutants(jobs: int) -> int:
    """Print a line for each: its name, the scenario or seed that detects it, and the rule that it breaks."""
    missed = 0
    for scenario in SCENARIOS.values():
        for mutant in scenario.mutants:
            result = scenario.run(mutant)
            detected = result.rule is not None or result.end != scenario.end
            missed += not detected
            print(mutant, scenario.name, result.rule or f"ends: {result.end}", sep="\t", flush=True)
    with get_context("fork").Pool(jobs) as pool:
        for name, found in pool.imap(_catch, sorted(seeded_mutants.MUTANTS)):
            missed += found is None
            where = f"seed {found.seed}" if found is not None else "not detected"
            print(name, where, found.rule if found is not None else "", sep="\t", flush=True)
    return 1 if missed else 0


def _catch(name: str) -> tuple[str, Result | None]:
    return name, catch(seeded_mutants.MUTANTS[name])


def _many(options: argparse.Namespace, mutant: Mutant | None, draw: Draw | None) -> int:
    began = stopwatch()
    seeds = range(options.start, options.start + options.seeds)
    verdicts: Counter[str] = Counter()
    rules: Counter[str] = Counter()
    first: dict[str, int] = {}
    ran = events = 0
    for result in run_seeds(seeds, options.jobs, mutant, draw):
        ran += 1
        events += result.events
        verdicts[result.verdict] += 1
        if result.rule:
            rules[result.rule] += 1
            first.setdefault(result.rule, result.seed)
            print(f"seed {result.seed}: {result.what[:300]}", flush=True)
            if not options.keep_going:
                drew = draw or pair_of(result.seed)
                print(story_of(run_seed(result.seed, mutant, drew, tell=True)))
                print(f"replay: python -m tests.simulator --seed {result.seed}{_flags(mutant, drew)} --story")
                break
    took_s = stopwatch() - began
    print(
        f"{ran} seeds in {took_s:.1f} s ({ran / took_s * 60:.0f} per minute), "
        f"{events} events; {dict(verdicts)}"
    )
    for rule, count in rules.most_common():
        print(f"  {count:5} x {rule} (first: seed {first[rule]})")
    return 1 if rules else 0


if __name__ == "__main__":
    sys.exit(main())
