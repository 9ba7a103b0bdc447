"""``python -m tests.simulator``: run seeds or directed scenarios, tell the story of one."""

from __future__ import annotations

import argparse
import gc
import logging
import shlex
import sys
import time
from collections import Counter

import structlog

from .cluster import Cluster
from .run import run_seed, run_seeds, story_of
from .scenario import ETCD, FAULTS, HOSTINGS, Draw, pair_of
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
    if options.scenario:
        return _directed(options.scenario, options.story)
    draw = None if options.pairs else Draw(options.focus, options.hosting)
    if options.seed is not None:
        return _one(options.seed, draw or pair_of(options.seed), options.story)
    return _many(options, draw)


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(kind.strip() for kind in text.split(","))
    unknown = sorted({*kinds} - {*FAULTS, *ETCD})
    if unknown:
        known = ", ".join(sorted({*FAULTS, *ETCD}))
        raise argparse.ArgumentTypeError(f"no faults: {', '.join(unknown)}; there are {known}")
    return kinds


def _flags(draw: Draw) -> str:
    """Return what the command line needs beside the seed to run the same universe again."""
    given = {"--focus": ",".join(draw.focus), "--hosting": draw.hosting or ""}
    return "".join(f" {flag} {shlex.quote(value)}" for flag, value in given.items() if value)


def _one(seed: int, draw: Draw, story: bool) -> int:
    result = run_seed(seed, draw, tell=story)
    if story:
        print(Cluster(seed, focus=draw.focus, hosting=draw.hosting).scenario)
        print(story_of(result))
    print(f"seed {seed}: {result.what or 'every rule held'} ({result.events} events, {result.verdict})")
    return 1 if result.rule else 0


def _directed(name: str, story: bool) -> int:
    scenario = SCENARIOS[name]
    result = scenario.run(tell=story)
    if story:
        print(story_of(result))
    print(f"{name}: {result.what or 'every rule held'} ({result.end}; expected: {scenario.end})")
    return 0 if result.rule is None and result.end == scenario.end else 1


def _many(options: argparse.Namespace, draw: Draw | None) -> int:
    began_s = time.monotonic()
    seeds = range(options.start, options.start + options.seeds)
    verdicts: Counter[str] = Counter()
    rules: Counter[str] = Counter()
    first: dict[str, int] = {}
    ran = events = 0
    for result in run_seeds(seeds, options.jobs, draw):
        ran += 1
        events += result.events
        verdicts[result.verdict] += 1
        if result.rule:
            rules[result.rule] += 1
            first.setdefault(result.rule, result.seed)
            print(f"seed {result.seed}: {result.what[:300]}", flush=True)
            if not options.keep_going:
                drew = draw or pair_of(result.seed)
                print(story_of(run_seed(result.seed, drew, tell=True)))
                print(f"replay: python -m tests.simulator --seed {result.seed}{_flags(drew)} --story")
                break
    took_s = time.monotonic() - began_s
    print(
        f"{ran} seeds in {took_s:.1f} s ({ran / took_s * 60:.0f} per minute), "
        f"{events} events; {dict(verdicts)}"
    )
    for rule, count in rules.most_common():
        print(f"  {count:5} x {rule} (first: seed {first[rule]})")
    return 1 if rules else 0


if __name__ == "__main__":
    sys.exit(main())
