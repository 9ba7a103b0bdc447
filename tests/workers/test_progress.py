"""Judge what workers do after SIGTERM, by a clock and a /proc of the test: a look every 10 ms, 50 ms idle at most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from elastic_agent.workers.guard import progress
from elastic_agent.workers.guard.progress import LOOK_EVERY_S, UNCLEAR_S, StopProgress

WORKER, IDLE_S = 7, 0.05
MEGABYTE = 2**20


@dataclass(frozen=True)
class Phase:
    """The activity of the worker for some time: the state of its only thread, and what it uses."""

    lasts_s: float
    state: str = "S"
    cpu_share: float = 0.0
    bytes_per_s: float = 0.0
    handles: bool = True
    stalls: bool = False
    """The machine stands still: there is one look, at the end."""


class Proc:
    """The part of `elastic_agent.linux` that is asked, for one worker."""

    def __init__(self) -> None:
        self.phase = Phase(0.0)
        self.cpu_s = 0.0
        self.bytes = 0.0

    def as_module(self) -> SimpleNamespace:
        return SimpleNamespace(
            boottime_s=lambda: 0.0,
            ignores=lambda pid, signum: False,
            ends_by=lambda pid, signum: not self.phase.handles,
            threads=lambda pid: [pid],
            thread_state=lambda tid: self.phase.state,
            cpu_time_s=lambda pid: self.cpu_s,
            transferred_bytes=lambda pid: int(self.bytes),
            resident_bytes=lambda pid: 0,
        )

    def looks(self, phases: tuple[Phase, ...]) -> Iterator[float]:
        """Go through the phases; yield the time of each look."""
        now_s = 0.0
        for self.phase in phases:
            count = 1 if self.phase.stalls else round(self.phase.lasts_s / LOOK_EVERY_S)
            step_s = self.phase.lasts_s / count
            for _ in range(count):
                now_s += step_s
                self.cpu_s += step_s * self.phase.cpu_share
                self.bytes += step_s * self.phase.bytes_per_s
                yield now_s


def killed_at_s(monkeypatch: pytest.MonkeyPatch, *phases: Phase) -> float | None:
    """Return when a worker that does this is to be killed; None: it may complete."""
    proc = Proc()
    monkeypatch.setattr(progress, "linux", proc.as_module())
    judged = StopProgress([WORKER], 15, IDLE_S, list, lambda process: False, 0.0)
    return next((now_s for now_s in proc.looks(phases) if not judged.look(now_s)), None)


COMPUTES = {"state": "R", "cpu_share": 1.0}


@pytest.mark.parametrize(
    "phases",
    [
        (Phase(5.0, **COMPUTES, bytes_per_s=50 * MEGABYTE),),
        (Phase(60.0, state="D"),),
        (Phase(60.0, state="R"),),
        (Phase(0.9, **COMPUTES), Phase(0.02, state="D"), Phase(0.9, **COMPUTES)),
        (Phase(0.04), Phase(0.02, state="D")) * 20,
        (Phase(0.1, **COMPUTES), Phase(9.0, state="R", stalls=True), Phase(0.2, **COMPUTES)),
        (Phase(0.02), Phase(9.0, stalls=True), Phase(0.01, state="D")),
    ],
    ids=[
        "writes or takes memory",
        "waits for a disk",
        "waits for a processor",
        "computes, and writes in between",
        "pauses for less than the idle time",
        "computes while the machine stands still",
        "waits while the machine stands still",
    ],
)
def test_a_worker_that_may_save_goes_on(monkeypatch: pytest.MonkeyPatch, phases: tuple[Phase, ...]) -> None:
    assert killed_at_s(monkeypatch, *phases) is None


@pytest.mark.parametrize(
    ("phase", "after_s"),
    [
        (Phase(9.0), IDLE_S),
        (Phase(9.0, **COMPUTES), UNCLEAR_S + IDLE_S),
        (Phase(9.0, bytes_per_s=1000), IDLE_S),
        (Phase(9.0, **COMPUTES, handles=False), IDLE_S),
    ],
    ids=["waits", "computes", "sends heartbeats", "has reset its handlers"],
)
def test_a_worker_that_does_nothing_is_killed(
    monkeypatch: pytest.MonkeyPatch, phase: Phase, after_s: float
) -> None:
    assert killed_at_s(monkeypatch, phase) == pytest.approx(after_s, abs=2 * LOOK_EVERY_S)
