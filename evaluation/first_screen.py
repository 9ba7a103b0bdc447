"""Makes the failures that people meet, and rates what the last 20 lines of each terminal say about each of them.

3 points: cause, machine and remedy; 2: cause and machine; 1: that something is wrong; 0: nothing. A failure has the
points of its worst terminal.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.figures import Result
from benchmarks.options import Options, progress

from .cases import Case, Rating, rated
from .connecting import CONNECTING
from .failing import FAILING, HANGING, rated_in_one_job
from .losing import LOSING
from .starting import STARTING

LANES = 2
"""So many failures are made at a time; most of the time they wait."""
JOB_S = 300.0
"""How long a job may take in which each generation fails in another way."""
NOTE = (
    "Points of a failure are those of its worst terminal. Seconds: from the failure, or the first line of a terminal, "
    "until the last terminal had named cause and machine."
)


def run(options: Options) -> Result:
    # Agents respect that signals were ignored when they were started, as in a script's background job.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with (
        tempfile.TemporaryDirectory(prefix="elastic-agent-screens-") as folder,
        ThreadPoolExecutor(LANES) as lanes,
    ):
        asked = [lanes.submit(one) for one in _work(Path(folder))]
        ratings = [rating for one in asked for rating in _shown(one.result())]
    points, most = sum(one.points for one in ratings), 3 * len(ratings)
    total = f"{len(ratings)} failures: {points} of {most} points ({100 * points / most:.0f} %)"
    return Result(
        "first_screen", [], [*map(_row, ratings), total, NOTE], tables={"first_screen": _json(ratings)}
    )


def _work(folder: Path) -> Iterable[Callable[[], list[Rating]]]:
    for name, kinds, noisy in (
        ("failing", FAILING, False),
        ("noisy", FAILING, True),
        ("hanging", HANGING, False),
    ):
        yield partial(rated_in_one_job, kinds, folder / name, JOB_S, noisy=noisy)
    for number, case in enumerate((*STARTING, *CONNECTING, *LOSING)):
        yield partial(_alone, case, folder / str(number))


def _alone(case: Case, folder: Path) -> list[Rating]:
    return [rated(case, folder)]


def _shown(ratings: list[Rating]) -> list[Rating]:
    for one in ratings:
        progress(_row(one))
    return ratings


def _row(one: Rating) -> str:
    after = "never" if one.after_s is None else f"{one.after_s:.0f} s"
    return f"| {one.name} | {one.source or ''} | `{one.said}` | {one.points} | {after} |"


def _json(ratings: list[Rating]) -> list[dict[str, object]]:
    return [
        {
            "failure": one.name,
            "number": one.source,
            "points": one.points,
            "terminals": {
                each.node: {"points": each.points, "after_s": each.after_s, "screen": each.screen}
                for each in one.terminals
            },
        }
        for one in ratings
    ]
