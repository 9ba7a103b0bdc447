"""Saying what is waited for: a live line on a terminal, sparse log lines elsewhere."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field

import pytest

from elastic_agent.logs import StatusLine, WaitingReporter
from tests.processes import on_a_terminal


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
    reporter = WaitingReporter(None, journal.info, clock)
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
def test_without_a_terminal_a_wait_is_logged_sparsely(
    updates: list[tuple[float, str, str]], lines: list[tuple[float, str, float]]
) -> None:
    assert logged(*updates) == lines


PROGRAM = """
import sys
from elastic_agent.logs import configure_logging, get_logger, waiting_reporter
now = [0.0]
configure_logging("auto", "info", sys.stderr)
reporter = waiting_reporter(clock=lambda: now[0])
reporter.update("waiting for 1 more node, " + "x" * 300)
now[0] = 1.0
reporter.update("waiting for 1 more node, " + "x" * 300)
get_logger().info("something happened")
now[0] = 75.0
reporter.update("waiting for no node")
reporter.clear()
get_logger().info("done")
"""


class Screen:
    """As much of a terminal as the status line uses: carriage return, erase to the end of line, new line."""

    def __init__(self) -> None:
        self.lines = [""]
        self.seen: list[str] = []

    def feed(self, text: str) -> None:
        for piece in re.split(r"(\r\n|\n|\r|\x1b\[K|\x1b\[[0-9;]*m)", text):
            if piece in ("\r\n", "\n"):
                self.lines.append("")
            elif piece == "\x1b[K":
                self.seen.append(self.lines[-1])
                self.lines[-1] = ""
            elif piece != "\r" and not piece.startswith("\x1b"):
                self.lines[-1] += piece
        self.seen.append(self.lines[-1])


def test_on_a_terminal_the_status_is_rewritten_below_the_log_lines() -> None:
    screen = Screen()
    screen.feed(on_a_terminal(sys.executable, "-c", PROGRAM))
    assert len([line for line in screen.lines if line]) == 2, "the live line left nothing behind"
    assert screen.lines[0].endswith("something happened")
    assert screen.lines[1].endswith("done")
    shown = [line for line in screen.seen if line.startswith("waiting")]
    assert any(line.startswith("waiting for 1 more node") for line in shown)
    assert all(len(line) < 80 for line in shown)
    assert any(line.endswith("x... (1 s)") for line in shown), "a line that is cut still tells how long"
    assert "waiting for no node (1 min 15 s)" in shown


def test_on_a_terminal_levels_are_coloured() -> None:
    assert "\x1b[32minfo" in on_a_terminal(sys.executable, "-c", PROGRAM)


IN_BACKGROUND = """
import fcntl, os, signal, sys, termios
from elastic_agent.logs import StatusLine
fcntl.ioctl(2, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
line = StatusLine(sys.stderr)
line.show("waiting")
if (shell := os.fork()) == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(2, os.getpgrp())
    os._exit(0)
os.waitid(os.P_PID, shell, os.WEXITED | os.WNOWAIT)
line.write_line("something happened")
line.clear()
"""


def test_a_job_that_goes_to_the_background_leaves_the_last_line_to_the_shell() -> None:
    shown = on_a_terminal(sys.executable, "-c", IN_BACKGROUND, start_new_session=True)
    assert shown == "\r\x1b[Kwaitingsomething happened\r\n"


def test_a_status_that_did_not_change_is_not_written_again() -> None:
    class Terminal:
        def __init__(self) -> None:
            self.writes: list[str] = []

        def write(self, text: str) -> int:
            self.writes.append(text)
            return len(text)

        def flush(self) -> None:
            pass

    terminal = Terminal()
    line = StatusLine(terminal)  # type: ignore[arg-type]
    line.show("waiting")
    line.show("waiting")
    line.clear()
    line.clear()
    assert terminal.writes == ["\r\x1b[Kwaiting", "\r\x1b[K"]
