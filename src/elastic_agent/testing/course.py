"""The course of a run, from what its workers recorded: which state each generation began with, and how far it came."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from elastic_agent.testing.processes import Line


@dataclass
class GenerationCourse:
    """The course of one generation. Positions count training steps from the beginning of training."""

    number: int
    start: int | None = None
    """The position it began at; None: unknown, because its state is none that was seen before."""
    base: int = 0
    """The same; if unknown, the position that the generation before it came to."""
    reached: int = 0
    """The position it came to."""
    lost: int | None = None
    """The number of steps of the generation before that it has to repeat; None for the first one, or if unknown."""
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
        self.newest: GenerationCourse | None = None
        """The newest generation that has made a step."""

    @property
    def position(self) -> int:
        """The number of training steps so far."""
        return self.newest.reached if self.newest else 0

    def feed(self, line: Line) -> None:
        """Take in one more record."""
        generation = self.generations.setdefault(line["generation"], GenerationCourse(line["generation"]))
        match line["kind"]:
            case "load" if line["error"] is None and not generation.is_under_way:
                generation.loaded.append(line["path"])
            case "saved" if generation.is_under_way:
                self.saves[line["path"]] += 1
            case "begin":
                self._begin(generation, line)
            case "step":
                self._count(generation, line)
                self._place(generation, line)
            case "stepped":
                self._place(generation, line)
            case "beat" if line["step"] is not None and not self._counts_optimizer_steps:
                self._beat(generation, line)

    def _begin(self, generation: GenerationCourse, line: Line) -> None:
        self._counts_optimizer_steps = True
        if generation.is_under_way:
            return
        generation._tracked = line["rank"]
        if self.newest is None:
            self._positions = {line["state"]: 0}
        self._start(generation, self._positions.get(line["state"], None if generation.loaded else 0))

    def _start(self, generation: GenerationCourse, start: int | None) -> None:
        earlier = [other for other in self.generations.values() if other.steps]
        earlier = [other for other in earlier if other.number < generation.number]
        before = max(earlier, key=lambda other: other.number, default=None)
        generation.is_under_way, generation.start = True, start
        generation.base = generation.reached = start if start is not None else before.reached if before else 0
        if before is not None and start is not None:
            generation.lost = max(0, before.reached - start)
            generation.from_scratch = start == 0 and before.reached > 0

    def _place(self, generation: GenerationCourse, line: Line) -> None:
        # Of every rank: the one that saved the state may be ahead of others, of which one was killed.
        position = generation.base + line["taken"]
        generation.reached = max(generation.reached, position)
        self._positions[line["state"]] = position

    def _beat(self, generation: GenerationCourse, line: Line) -> None:
        if not generation.is_under_way:
            generation._tracked = line["rank"]
            self._origin = line["step"] if self._origin is None else self._origin
            self._start(generation, line["step"] - self._origin)
        self._count(generation, line)
        if line["rank"] == generation._tracked:
            generation.reached = line["step"] - (self._origin or 0) + 1

    def _count(self, generation: GenerationCourse, line: Line) -> None:
        generation.steps[line["rank"]] += 1
        generation.nodes.add(line["node"])
        if self.newest is None or generation.number > self.newest.number:
            self.newest = generation
        if generation.first_step_s is None:
            generation.first_step_s = line["boottime_s"]
