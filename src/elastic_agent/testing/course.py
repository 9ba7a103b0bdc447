"""The course of a run, from what its workers recorded: which state each generation began with, and how far it came."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from elastic_agent.testing.records import Line


@dataclass
class GenerationCourse:
    """What one generation did. Positions count training steps from the beginning of training."""

    number: int
    start: int | None = None
    """The position it began at; None: unknown, because its state is none that was seen before."""
    base: int = 0
    """The same; if unknown, the position that the generation before it came to."""
    reached: int = 0
    """The position it came to."""
    lost: int | None = None
    """How many steps of the generation before it has to repeat; None for the first one, or if unknown."""
    from_scratch: bool = False
    """It began with untrained parameters, although steps were made before."""
    is_under_way: bool = False
    """Its first step has begun."""
    loaded: list[str] = field(default_factory=list)
    """Files that it loaded before its first step."""
    steps: Counter[int] = field(default_factory=Counter)
    """Steps by rank."""
    nodes: set[str] = field(default_factory=set)
    """Nodes that made steps."""
    first_step_s: float | None = None
    """CLOCK_BOOTTIME of the end of its first step."""
    _tracked: int = -1
    """The rank that was the first to begin."""


class Course:
    """Reads the records of a run one by one (:meth:`feed`)."""

    def __init__(self) -> None:
        self.generations: dict[int, GenerationCourse] = {}
        self.saves: Counter[str] = Counter()
        """Finished saves during training, by path; under an empty one those into memory, as Lightning's."""
        self._positions: dict[str, int] = {}
        self._origin: int | None = None
        self._counts_optimizer_steps = False
        self._newest: GenerationCourse | None = None

    @property
    def newest(self) -> GenerationCourse | None:
        """The newest generation that has made a step."""
        return self._newest

    @property
    def position(self) -> int:
        """How far training is."""
        return self.newest.reached if self.newest else 0

    def feed(self, line: Line) -> None:
        """Take in one more record."""
        one = self.generations.setdefault(line["generation"], GenerationCourse(line["generation"]))
        match line["kind"]:
            case "load" if line["error"] is None and not one.is_under_way:
                one.loaded.append(line["path"])
            case "saved" if one.is_under_way:
                self.saves[line["path"]] += 1
            case "begin":
                self._begin(one, line)
            case "step":
                self._step(one, line)
            case "stepped":
                self._place(one, line)
            case "beat" if line["step"] is not None and not self._counts_optimizer_steps:
                self._beat(one, line)

    def _before(self, one: GenerationCourse) -> GenerationCourse | None:
        earlier = [other for other in self.generations.values() if other.number < one.number and other.steps]
        return max(earlier, key=lambda other: other.number, default=None)

    def _begin(self, one: GenerationCourse, line: Line) -> None:
        self._counts_optimizer_steps = True
        if one.is_under_way:
            return
        one._tracked = line["rank"]
        before = self._before(one)
        if before is None:
            self._start(one, 0, before)
            self._positions = {line["state"]: 0}
        else:
            self._start(one, self._positions.get(line["state"], None if one.loaded else 0), before)

    def _start(self, one: GenerationCourse, start: int | None, before: GenerationCourse | None) -> None:
        one.is_under_way, one.start = True, start
        one.base = one.reached = start if start is not None else before.reached if before else 0
        if before is not None and start is not None:
            one.lost = max(0, before.reached - start)
            one.from_scratch = start == 0 and before.reached > 0

    def _step(self, one: GenerationCourse, line: Line) -> None:
        self._count(one, line)
        self._place(one, line)

    def _place(self, one: GenerationCourse, line: Line) -> None:
        # Of every rank: the one that saved the state may be ahead of others, of which one was killed.
        position = one.base + line["taken"]
        one.reached = max(one.reached, position)
        self._positions[line["state"]] = position

    def _beat(self, one: GenerationCourse, line: Line) -> None:
        if not one.is_under_way:
            one._tracked = line["rank"]
            self._origin = line["step"] if self._origin is None else self._origin
            self._start(one, line["step"] - self._origin, self._before(one))
        self._count(one, line)
        if line["rank"] == one._tracked:
            one.reached = line["step"] - (self._origin or 0) + 1

    def _count(self, one: GenerationCourse, line: Line) -> None:
        one.steps[line["rank"]] += 1
        one.nodes.add(line["node"])
        if self._newest is None or one.number > self._newest.number:
            self._newest = one
        if one.first_step_s is None:
            one.first_step_s = line["boottime_s"]
