"""What every benchmark gives: figures with all their samples, printed as a table, written as JSON."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("elastic-agent", "torch", "msgspec", "structlog")


@dataclass
class Figure:
    """One thing measured for one launcher. ``samples`` are in ``unit``; ``misses`` say why there is none."""

    what: str
    who: str
    unit: str
    target: float | None = None
    """What elastic-agent is to stay under, in ``unit``."""
    samples: list[float] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)

    @property
    def median(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None

    def add(self, outcome: float | str) -> None:
        """A measured value, or in words why there is none."""
        if isinstance(outcome, str):
            self.misses.append(outcome)
        else:
            self.samples.append(outcome)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "median": self.median}


@dataclass(frozen=True)
class Ratio:
    """How many times one launcher's median is that of another in the same run."""

    what: str
    faster: str
    slower: str
    times: float
    target: float | None = None
    """How many times it is to be, at least."""

    def __str__(self) -> str:
        aim = "" if self.target is None else f" (target: at least {self.target:g})"
        missed = " MISSED" if self.target is not None and self.times < self.target else ""
        times = f"{self.times:.{1 if self.times < 10 else 0}f}"
        return (
            f"{self.what}: {self.faster} {times} times faster than {self.slower} in the same run{aim}{missed}"
        )


def ratio(ours: Figure, theirs: Figure, target: float | None = None) -> list[Ratio]:
    """One, or none where one of the two has no median."""
    if not ours.median or not theirs.median:
        return []
    return [Ratio(ours.what, ours.who, theirs.who, theirs.median / ours.median, target)]


class Figures:
    """Figures by what was measured and on which system, grouped, in the order in which they came."""

    def __init__(self) -> None:
        self._all: dict[tuple[str, str], Figure] = {}

    def __iter__(self) -> Iterator[Figure]:
        measured = [figure for figure in self._all.values() if figure.samples or figure.misses]
        order = list(dict.fromkeys(figure.what for figure in measured))
        return iter(sorted(measured, key=lambda figure: order.index(figure.what)))

    def of(self, what: str, who: str, unit: str = "s", target: float | None = None) -> Figure:
        """The figure of that name; made of the rest when it is new."""
        return self._all.setdefault((what, who), Figure(what, who, unit, target))


@dataclass
class Result:
    """What one benchmark found; ``ratios`` and ``notes`` are printed below the table."""

    benchmark: str
    figures: list[Figure]
    notes: list[str] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    tables: dict[str, Any] = field(default_factory=dict)
    """Further details, for the JSON file."""


@dataclass(frozen=True)
class Options:
    """``runs``: how often each thing is measured; ``quick``: most things once, and only what takes seconds."""

    runs: int = 5
    quick: bool = False
    isolated: bool = False
    """In a network namespace of our own, where every look-up of a name fails at once."""

    @property
    def times(self) -> int:
        return 1 if self.quick else self.runs


def progress(text: str) -> None:
    """A line while it goes on; the tables come at the end."""
    print(f"  … {text}", flush=True)


def show(number: float, unit: str) -> str:
    """In words; less than a second in milliseconds."""
    if unit == "s" and abs(number) < 1:
        number, unit = number * 1e3, "ms"
    digits = 0 if abs(number) >= 100 else 1 if abs(number) >= 20 else 2
    return f"{number:.{digits}f} {unit}"


def print_figures(figures: Iterable[Figure]) -> None:
    """A table: the median, the fastest and slowest beside it, how many runs, and the target."""
    head = ("", "", "median", "least", "most", "runs", "target")
    print_table([head, *(_row(figure) for figure in figures)])


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Two columns of words, then columns of numbers."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        words = [text.ljust(width) for text, width in zip(row[:2], widths[:2], strict=True)]
        numbers = [text.rjust(width) for text, width in zip(row[2:], widths[2:], strict=True)]
        print("  ".join([*words, *numbers]).rstrip(), flush=True)


def _row(figure: Figure) -> tuple[str, ...]:
    runs = len(figure.samples) + len(figure.misses)
    target = f"≤ {show(figure.target, figure.unit)}" if figure.target is not None else ""
    words = "; ".join(dict.fromkeys(figure.misses))
    if figure.median is None:
        return (figure.what, figure.who, words or "not measured", "", "", str(runs), target)
    count = f"{len(figure.samples)} of {runs} ({words})" if figure.misses else str(runs)
    spread = (show(min(figure.samples), figure.unit), show(max(figure.samples), figure.unit))
    missed = " MISSED" if figure.target is not None and figure.median > figure.target else ""
    return (figure.what, figure.who, show(figure.median, figure.unit), *spread, count, target + missed)


def circumstances(isolated: bool) -> dict[str, Any]:
    """The machine, the versions and the commit that the figures belong to."""
    changed = _git("status", "--porcelain", "--", "src", "benchmarks")
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "commit": _git("rev-parse", "HEAD") or "unknown",
        "uncommitted_changes": bool(changed),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_average_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "import_torch_s": round(min(import_torch_s() for _ in range(3)), 3),
        "network": "own network namespace, loopback only" if isolated else "the machine's own, over loopback",
    }


def import_torch_s() -> float:
    """Return how long an import of torch takes, which every start and restart contains: it dates the machine."""
    began_s = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - began_s


def _git(*words: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
