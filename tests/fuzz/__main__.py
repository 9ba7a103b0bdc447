"""``python -m tests.fuzz``: feed mutated inputs to every decoder and parser of the package."""

from __future__ import annotations

import argparse
import logging
import sys
import time

import structlog

from .runner import HEADER, Report, fuzz
from .targets import all_targets


def main() -> int:
    """0 if nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "--inputs", type=int, default=100_000, help="how many inputs for all targets together"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed makes the same inputs")
    parser.add_argument("--only", action="append", help="fuzz this target only (repeatable)")
    parser.add_argument("--list", action="store_true", help="list the targets")
    wanted = parser.parse_args()
    targets = [one for one in all_targets() if wanted.only is None or one.name in wanted.only]
    if not targets:
        parser.error("there is no such target; --list shows them")
    if wanted.list:
        print(*(one.name for one in targets), sep="\n")
        return 0
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL)
    )  # invalid records
    begun_s = time.monotonic()
    total = sum(one.weight for one in targets)
    print(HEADER, flush=True)
    reports = []
    for target in targets:
        reports.append(fuzz(target, max(1, round(wanted.inputs * target.weight / total)), wanted.seed))
        target.close()
        print(reports[-1].line(), flush=True)
    _conclude(reports, time.monotonic() - begun_s, wanted.seed)
    return 1 if any(one.findings for one in reports) else 0


def _conclude(reports: list[Report], took_s: float, seed: int) -> None:
    count = sum(one.inputs for one in reports)
    print(f"\n{count} inputs, seed {seed}, {took_s:.0f} s, {count / took_s:.0f} inputs per second")
    for report in reports:
        for finding in report.findings.values():
            print(f"\n{report.target}: {finding.what} ({report.seen[finding.what]} times)")
            print(f"input: {finding.data[:2000]!r} ({len(finding.data)} bytes)\n{finding.detail}")
    print("\nno findings" if not any(one.findings for one in reports) else "")


sys.exit(main())
