"""The training of an agent's node since the agent was started: in bounded memory, and as plots in SVG."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from elastic_agent.monitoring.status import Goodput

MOST_SAMPLES = 300


class Sample(NamedTuple):
    """The progress of a node at a time (seconds since 1970), repeated steps included."""

    time_s: float
    training_s: float = 0.0
    steps: int = 0


class History:
    """Samples of one node, roughly evenly spaced, at most :data:`MOST_SAMPLES`."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        """The last one is replaced until it is far enough from the one before."""
        self._spacing_s = 0.0
        self._last: tuple[object, int] = None, 0

    def see(self, time_s: float, goodput: Goodput, generation: int, step: int, *, is_counted: bool) -> None:
        """Note how far the node is; ``is_counted``: ``step`` is a number of steps since the generation began."""
        before, self._last = self._last, ((generation, is_counted), step)
        begin = before[1] if before[0] == self._last[0] else 0 if is_counted else step
        steps = max(0, step - begin) + (self.samples[-1].steps if self.samples else 0)
        if len(self.samples) > 1 and self.samples[-1].time_s - self.samples[-2].time_s < self._spacing_s:
            self.samples.pop()
        self.samples.append(Sample(time_s, goodput.training_s, steps))
        if len(self.samples) == MOST_SAMPLES:
            self._spacing_s = 2 * (time_s - self.samples[0].time_s) / MOST_SAMPLES
            del self.samples[1:-1:2]


def draw(samples: Sequence[Sample], from_s: float, until_s: float) -> Iterator[tuple[str, str, str]]:
    """Yield plots of what a node did between these times, if it has made a step.

    Each is a name, the upper end of the axis, which begins at 0, and a path in 1,000 columns and 100 lines.
    """
    speeds, shares = [], []
    for first, last in itertools.pairwise(samples):
        length_s, at = last.time_s - first.time_s, 1000 * (last.time_s - from_s) / (until_s - from_s)
        if length_s > 0 and at <= 1000:  # otherwise the clock was set, or the run is over
            speeds.append((at, (last.steps - first.steps) / length_s))
            shares.append((at, 100 * min(max(0.0, last.training_s - first.training_s) / length_s, 1.0)))
    fastest = max((speed for _, speed in speeds), default=0.0)
    for name, top, points in ("steps per second", fastest, speeds), ("goodput in %", 100, shares):
        if fastest and top:
            path = "L".join(f"{at:.1f} {100 - 100 * value / top:.1f}" for at, value in points)
            yield f"{name}, this node", f"{top:.3g}", f"M{path}"


def times(from_s: float, until_s: float) -> list[str]:
    """Return five times for the axis, from its begin to its end."""
    length_s = until_s - from_s
    form = "%H:%M:%S" if length_s < 600 else "%H:%M" if length_s < 86400 else "%d %b %H:%M"
    return [time.strftime(form, time.localtime(from_s + length_s * part / 4)) for part in range(5)]
