"""Feeds inputs to a target, and measures what they cost."""

from __future__ import annotations

import gc
import os
import signal
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from .mutator import Mutator
from .target import Target

HANG_S = 30
"""So many inputs of a batch may take so long together."""
_BATCH = 200
_SAMPLED = 300
"""How many inputs are repeated to see whether memory grows."""
_TOLERATED_BYTES = 64 * 1024
_MOST_FINDINGS = 20
"""Different ones, for each target."""


@dataclass
class Finding:
    """An input with which something does not hold."""

    what: str
    """The exception and where it was raised."""
    data: bytes
    detail: str


@dataclass
class Report:
    """What happened to the inputs of a target."""

    target: str
    inputs: int = 0
    cpu_s: float = 0.0
    slowest_s: float = 0.0
    """The longest processor time of an input, of two measurements the shorter one."""
    grown_bytes: int = 0
    """The resident memory of the process at the end, less that after the first tenth of the inputs."""
    held_bytes: int = 0
    """What Python objects still held after the same inputs were fed again."""
    findings: dict[str, Finding] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    """How often each finding occurred."""

    @property
    def rate(self) -> float:
        """Inputs for each second of processor time, mutation included."""
        return self.inputs / self.cpu_s if self.cpu_s else 0.0

    def line(self) -> str:
        """For the table."""
        found = f"{len(self.findings)} FINDINGS" if self.findings else "-"
        return (
            f"{self.target:<24} {self.inputs:>10} {self.rate:>8.0f}/s {1000 * self.slowest_s:>8.1f} ms "
            f"{self.grown_bytes / 1024:>8.0f} KiB {self.held_bytes:>8} B  {found}"
        )


HEADER = f"{'target':<24} {'inputs':>10} {'rate':>10} {'slowest':>11} {'RSS':>12} {'held':>10}  findings"


class _HangError(BaseException):
    """Raised in the middle of an input that does not come to an end."""


def fuzz(target: Target, inputs: int, seed: int, sampled: int = _SAMPLED) -> Report:
    """Feed a target. ``sampled``: with how many inputs, which are repeated, to see if memory grows; 0: not at all."""
    report = Report(target.name)
    mutator = Mutator(target.samples, f"{seed} {target.name}")
    settled_bytes = 0
    begun_s = time.process_time()
    with _alarm():
        signal.alarm(HANG_S)
        for sample in target.samples:
            _feed(target, sample, report)
        while report.inputs < inputs:
            signal.alarm(HANG_S)
            for _ in range(min(_BATCH, inputs - report.inputs)):
                _feed(target, mutator.next(), report)
                report.inputs += 1
            if not settled_bytes and report.inputs >= inputs // 10:
                settled_bytes = _resident_bytes()
    report.cpu_s = time.process_time() - begun_s
    if not sampled:  # a collection takes long where much is imported
        return report
    gc.collect()
    report.grown_bytes = _resident_bytes() - settled_bytes
    report.held_bytes = _held_bytes(target, seed, min(sampled, inputs))
    if report.held_bytes > _TOLERATED_BYTES:
        _note(report, "memory grows", b"", f"{report.held_bytes} bytes after {sampled} inputs were repeated")
    return report


def _feed(target: Target, data: bytes, report: Report) -> None:
    before_s = time.process_time()
    try:
        target.feed(data)
    except _HangError as error:
        _note(report, f"hang in {report.target}", data, "".join(traceback.format_exception(error, limit=-8)))
        signal.alarm(HANG_S)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}"
        _note(report, what, data, "".join(traceback.format_exception(error, limit=-6)))
    took_s = time.process_time() - before_s
    if took_s > target.slow_s:
        before_s = time.process_time()
        with suppress(Exception, _HangError):
            target.feed(data)
        took_s = min(took_s, time.process_time() - before_s)
        if took_s > target.slow_s:
            _note(report, "slow", data, f"{took_s:.3f} s for {len(data)} bytes")
    report.slowest_s = max(report.slowest_s, took_s)


def _note(report: Report, what: str, data: bytes, detail: str) -> None:
    report.seen[what] += 1
    known = report.findings.get(what)
    if (known is None and len(report.findings) < _MOST_FINDINGS) or (
        known is not None and len(data) < len(known.data)
    ):
        report.findings[what] = Finding(what, data, detail)


def _held_bytes(target: Target, seed: int, count: int) -> int:
    """How much more memory Python objects hold after the same inputs were fed a second time."""
    mutator = Mutator(target.samples, f"{seed} {target.name} memory")
    inputs = [mutator.next() for _ in range(count)]
    ignored = Report(target.name)
    for data in inputs:
        _feed(target, data, ignored)
    tracemalloc.start()
    try:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for data in inputs:
            _feed(target, data, ignored)
        gc.collect()
        return max(0, tracemalloc.get_traced_memory()[0] - before)
    finally:
        tracemalloc.stop()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def _alarm() -> Iterator[None]:
    def ring(_: int, __: FrameType | None) -> None:
        raise _HangError(f"{_BATCH} inputs took more than {HANG_S} s")

    before = signal.signal(signal.SIGALRM, ring)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
