"""The plots of the status page: what is kept of a long run, and what is drawn."""

from __future__ import annotations

import itertools
import re

import pytest
from msgspec.structs import replace

from elastic_agent.monitoring.status import GenerationStatus, Goodput
from elastic_agent.web.page import run_page
from elastic_agent.web.plots import MOST_SAMPLES, History, Sample, draw
from tests.web.test_status_page import running

DAY_S = 86400.0


def history(length_s: float) -> History:
    """Return what is kept of a run of this length, with 2 steps per second, looked at every 5 seconds."""
    kept = History()
    for look in range(int(length_s / 5) + 1):
        at_s = 5.0 * look
        kept.see(1e9 + at_s, Goodput(at_s / 2, at_s / 2), 1, 10 * look, is_counted=False)
    return kept


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"([-\d.]+) ([-\d.]+)", path)]


@pytest.mark.parametrize("length_s", [600.0, 3600.0, DAY_S, 7 * DAY_S])
def test_of_a_run_of_any_length_some_hundred_even_points_are_kept_and_its_speed_stays_right(
    length_s: float,
) -> None:
    samples = history(length_s).samples
    assert min(MOST_SAMPLES // 2, length_s / 5) <= len(samples) <= MOST_SAMPLES
    assert (samples[0].time_s, samples[-1].time_s) == (1e9, 1e9 + length_s)
    gaps_s = [last.time_s - first.time_s for first, last in itertools.pairwise(samples)]
    assert max(gaps_s) <= 2 * min(gaps_s[:-1])
    speeds, goodput = draw(samples, 1e9, 1e9 + length_s)
    assert speeds[:2] == ("steps per second, this node", "2")
    assert {y for _, y in points(speeds[2])} == {0.0}, "always as fast as at most"
    assert goodput[:2] == ("goodput in %, this node", "100")
    assert {y for _, y in points(goodput[2])} == {50.0}
    assert points(goodput[2])[-1][0] == 1000.0


def test_a_pause_is_seen_and_a_training_that_is_resumed_has_not_made_the_steps_before() -> None:
    kept = History()
    looks = [(0, 1, 10), (5, 1, 20), (10, 2, 0), (15, 2, 0), (20, 2, 5), (25, 3, 9000), (30, 3, 9010)]
    for at_s, generation, step in looks:
        kept.see(1e9 + at_s, Goodput(at_s, 0), generation, step, is_counted=False)
    assert [sample.steps for sample in kept.samples] == [0, 10, 10, 10, 15, 15, 25]
    (_, top, path), _ = draw(kept.samples, 1e9, 1e9 + 30)
    assert (top, [y for _, y in points(path)]) == ("2", [0.0, 100.0, 100.0, 50.0, 100.0, 0.0])


def test_steps_that_are_counted_since_the_start_of_the_workers_are_all_seen() -> None:
    kept = History()
    looks = [(0, 0, 0), (5, 1, 10), (10, 1, 20), (15, 2, 7), (20, 2, 17)]
    for at_s, generation, step in looks:
        kept.see(1e9 + at_s, Goodput(at_s, 0), generation, step, is_counted=True)
    kept.see(1e9 + 25, Goodput(25, 0), 2, 4017, is_counted=False)  # now the script reports its own
    assert [sample.steps for sample in kept.samples] == [0, 10, 20, 27, 37, 37]


def test_a_clock_that_is_set_draws_nothing_outside_of_the_plot() -> None:
    samples = [Sample(1e9 + at_s, at_s, int(at_s)) for at_s in (0, 10, 5, 20, 90)]
    for _, _, path in draw(samples, 1e9, 1e9 + 30):
        assert all(0 <= x <= 1000 and 0 <= y <= 100 for x, y in points(path)), path


def test_the_page_shows_the_time_that_the_agent_has_seen() -> None:
    """A run that was resumed after a weekend is not a line at the edge of its plot."""
    ends_s = 1e9 + 3600
    rows = (
        GenerationStatus(1, 1e9 - 3 * DAY_S, 1e9 - 2 * DAY_S, ("n0",), 2, "stopped"),
        GenerationStatus(2, 1e9 + 36, 1e9 + 1836, ("n0",), 2, "n0/1 failed", failed=True),
        GenerationStatus(3, 1e9 + 1836, None, ("n0",), 4),
    )
    status = replace(running(1), asked_s=ends_s, generation=3, since_s=1e9 + 1836, generations=rows)
    shown = run_page(status, history(3600).samples, shows_all=False).decode()
    bars = re.findall(
        r'<i class="(\w+(?: failed)?)" style="left:([\d.]+)%; width:([\d.]+)%; height:(\d+)%', shown
    )
    assert bars == [("past failed", "1.0", "50.0", "50"), ("now", "51.0", "49.0", "100")]
    assert shown.count("<path ") == 2
    assert 'aria-label="steps per second, this node, 0 to 2"' in shown
