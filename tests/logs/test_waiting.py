"""Saying what is waited for: sparse log lines, on a terminal too."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from elastic_agent.logs import WaitingReporter
from tests.terminal import Terminal


@dataclass
class Clock:
    """A clock that is set by hand."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Journal:
    """The lines logged, with the time on the clock."""

    clock: Clock
    lines: list[tuple[float, str, dict[str, object]]] = field(default_factory=list)

    def info(self, event: str, **fields: object) -> None:
        self.lines.append((self.clock.now_s - 100.0, event, fields))


def logged(*updates: tuple[float, str, str]) -> list[tuple[float, str, object]]:
    """Return when what was logged, and the time waited, of updates at these times with these texts and topics."""
    clock = Clock()
    journal = Journal(clock)
    reporter = WaitingReporter(journal.info, clock)
    for at_s, text, topic in updates:
        clock.now_s = 100.0 + at_s
        if text:
            reporter.update(text, topic)
        else:
            reporter.clear()
    return [(round(when, 3), text, fields["waited_s"]) for when, text, fields in journal.lines]


SECONDS = [(float(at_s), "waiting for 1 more node", "1") for at_s in range(251)]


@pytest.mark.parametrize(
    ("updates", "lines"),
    [
        (SECONDS, [(at_s, "waiting for 1 more node", at_s) for at_s in (0, 10, 30, 60, 120, 180, 240)]),
        (
            [(0, "waiting for 2 more nodes", "1"), (4, "two", "1"), (4, "waiting for 1 more node", "2")],
            [(0, "waiting for 2 more nodes", 0), (4, "waiting for 1 more node", 4)],
        ),
        ([(0.005 * node, f"{node}", f"{node}") for node in range(300)], [(0, "0", 0), (1, "200", 1)]),
        (
            [(at_s, "waiting", "") for at_s in (0, 100, 119, 120)],
            [(0, "waiting", 0), (100, "waiting", 100), (120, "waiting", 120)],
        ),
        ([(0, "waiting", ""), (1, "", ""), (500, "again", "")], [(0, "waiting", 0), (500, "again", 0)]),
    ],
    ids=[
        "at growing intervals",
        "a topic that changes",
        "many changes in a second",
        "a late update",
        "a new wait",
    ],
)
def test_a_wait_is_logged_sparsely(
    updates: list[tuple[float, str, str]], lines: list[tuple[float, str, float]]
) -> None:
    assert logged(*updates) == lines


PROGRAM = """
import sys
from elastic_agent.logs import WaitingReporter, configure_logging, get_logger
now = [0.0]
configure_logging("auto", "info", sys.stderr)
reporter = WaitingReporter(get_logger().info, lambda: now[0])
reporter.update("waiting for 1 more node, " + "x" * 300)
get_logger().info("something happened")
now[0] = 75.0
reporter.update("waiting for no node")
reporter.clear()
"""


def test_on_a_terminal_waits_are_lines_that_stay_and_levels_are_coloured(tmp_path: Path) -> None:
    with Terminal([sys.executable, "-c", PROGRAM], os.environ, tmp_path) as terminal:
        assert terminal.ended() == 0
    first, second, third = terminal.shown.splitlines()
    assert f"waiting for 1 more node, {'x' * 300} " in first
    assert "something happened" in second
    assert "waiting for no node" in third
    assert all("\x1b[32minfo" in line for line in (first, second, third))
    assert "\r" not in terminal.shown, "nothing is written over"
