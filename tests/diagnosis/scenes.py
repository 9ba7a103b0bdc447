"""Failures of workers with torch 2.13 and gloo, as they happened, and the reports that nodes make of them.

Each file in `texts/` is one failure: of each rank the code with which it ended, when, and the end of its stderr. They
were made by one script with three workers: 20 all-reduces, then one does what the file is named after. Of two that
ended in the same words, one is kept.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from elastic_agent.agent.worker_group.endings import failure_fields
from elastic_agent.diagnosis.records import NodeReport, WorkerReport, WorkerState
from elastic_agent.workers.failure import describe

TEXTS = Path(__file__).parent / "texts"
EXAMPLES = tomllib.loads(Path(__file__).with_name("errors.toml").read_text())
"""For each known error, texts that are one (`example`), and texts that are none (`not_like`)."""
HARMLESS = tuple(Path(__file__).with_name("harmless.txt").read_text().splitlines())
"""Lines that programs write to stderr in runs that succeed, each of which has been taken for an error."""
_HEAD = re.compile(r"^=== rank (\d+): returncode (-?\d+), after (\d+) ms\n", re.MULTILINE)


@dataclass(frozen=True)
class End:
    """The end of one rank."""

    returncode: int
    after_s: float
    stderr: str


@cache
def scene(name: str) -> dict[int, End]:
    """Return the ends in one of the failures, by rank."""
    _, *parts = _HEAD.split((TEXTS / f"{name}.txt").read_text())
    rows = zip(parts[::4], parts[1::4], parts[2::4], parts[3::4], strict=True)
    return {int(rank): End(int(code), int(after) / 1000, stderr) for rank, code, after, stderr in rows}


def worker(slot: int, rank: int, end: End, ended_s: float, **changes: object) -> WorkerReport:
    """Return what the node of a worker reports of its end."""
    failure = describe(slot, end.returncode, "", end.stderr)
    state = WorkerState.FAILED if end.returncode != 0 else WorkerState.SUCCEEDED
    known = failure_fields(failure) if end.returncode != 0 else {}
    ended = {"state": state, "pid": 1000 + rank, "returncode": end.returncode, "ended_s": ended_s}
    return WorkerReport(slot, rank, **(ended | known | changes))  # type: ignore[arg-type]


def report(node: int, *workers: WorkerReport, **facts: str) -> NodeReport:
    """Of node n0, n1 …, each on a machine of its own."""
    facts = {"other_machines": "2", **facts}
    return NodeReport(
        f"n{node}", f"i{node}", 1, 1e9, f"10.0.0.{node}", f"host{node}", workers, facts, is_final=True
    )


def reports(name: str, **facts: str) -> list[NodeReport]:
    """The failure as it was, with one node for each rank; the facts are those of n0."""
    return [
        report(rank, worker(0, rank, end, 1e9 + end.after_s), **(facts if rank == 0 else {}))
        for rank, end in scene(name).items()
    ]
