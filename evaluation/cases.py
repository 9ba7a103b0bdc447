"""What a case is: a failure, and what every terminal is to show of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .stage import Stage, Terminal, Words


@dataclass(frozen=True)
class Case:
    """One failure on a stage of its own. ``source``: its number in the list of failures; 0: none."""

    name: str
    source: int
    play: Callable[[Stage], None]
    """Starts the agents and makes the failure."""
    expected: Mapping[str, Words]
    """By node; a machine that no agent runs on has no terminal."""
    nodes: tuple[str, ...] = ("a", "b")
    nnodes: str = ""
    run_id: str | None = "job"
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rating:
    """How a failure was shown: as its worst terminal."""

    name: str
    source: int
    terminals: tuple[Terminal, ...]

    @property
    def points(self) -> int:
        return min((one.points for one in self.terminals), default=0)

    @property
    def said(self) -> str:
        """The line that names the cause, on the last terminal that has one."""
        return next((one.said for one in reversed(self.terminals) if one.said), "")

    @property
    def after_s(self) -> float | None:
        """When the last terminal named cause and machine."""
        times = [one.after_s for one in self.terminals]
        return None if None in times else max((one for one in times if one is not None), default=None)


def rated(case: Case, folder: Path) -> Rating:
    """Play the case and rate it."""
    folder.mkdir(parents=True)
    with Stage(folder, case.nodes, case.nnodes, case.run_id, case.options) as stage:
        case.play(stage)
        return Rating(case.name, case.source, tuple(stage.watch(case.expected)))
