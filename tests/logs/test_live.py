"""Saying what is waited for: a live line on a terminal, sparse log lines elsewhere."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field

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
    """What was logged, with the time on the clock."""

    clock: Clock
    lines: list[tuple[float, str, dict[str, object]]] = field(default_factory=list)

    def info(self, event: str, **fields: object) -> None:
        self.lines.append((self.clock.now_s - 100.0, event, fields))


def follow(reporter: WaitingReporter, clock: Clock, until_s: float) -> None:
    """Call ``tick`` exactly when the reporter asks for it."""
    while reporter.next_due_s is not None and reporter.next_due_s <= 100.0 + until_s:
        clock.now_s = max(clock.now_s, reporter.next_due_s)
        reporter.tick()
    clock.now_s = 100.0 + until_s


def elsewhere() -> tuple[WaitingReporter, Clock, Journal]:
    clock = Clock()
    journal = Journal(clock)
    return WaitingReporter(None, journal.info, clock), clock, journal


def test_without_a_terminal_a_wait_is_logged_at_growing_intervals() -> None:
    reporter, clock, journal = elsewhere()
    reporter.update("waiting for 1 more node", {"nodes": 1})
    follow(reporter, clock, 250)
    assert [when for when, _, _ in journal.lines] == [0, 10, 30, 60, 120, 180, 240]
    assert journal.lines[2] == (30, "waiting for 1 more node", {"waited_s": 30.0, "nodes": 1})


def test_without_a_terminal_a_fact_equal_to_the_text_is_not_repeated() -> None:
    reporter, clock, journal = elsewhere()
    reporter.update("waiting for a", {"awaited": "waiting for a"})
    clock.now_s += 4
    reporter.update("waiting for b", {"awaited": "waiting for b"})
    assert journal.lines == [
        (0, "waiting for a", {"waited_s": 0.0}),
        (4, "waiting for b", {"waited_s": 4.0}),
    ]


def test_without_a_terminal_changed_facts_are_logged_and_changed_text_is_not() -> None:
    reporter, clock, journal = elsewhere()
    reporter.update("waiting for 2 more nodes", {"nodes": 1})
    clock.now_s += 4
    reporter.update("waiting for two more nodes", {"nodes": 1})
    reporter.update("waiting for 1 more node", {"nodes": 2})
    assert [(when, text) for when, text, _ in journal.lines] == [
        (0, "waiting for 2 more nodes"),
        (4, "waiting for 1 more node"),
    ]
    follow(reporter, clock, 10)
    assert len(journal.lines) == 3


def test_without_a_terminal_many_changes_in_a_second_are_one_line() -> None:
    reporter, clock, journal = elsewhere()
    for nodes in range(100):
        reporter.update("waiting", {"nodes": nodes})
        clock.now_s += 0.005
    follow(reporter, clock, 5)
    assert [(when, fields["nodes"]) for when, _, fields in journal.lines] == [(0, 0), (1, 99)]


def test_a_late_tick_logs_once_and_the_schedule_continues() -> None:
    reporter, clock, journal = elsewhere()
    reporter.update("waiting", {})
    clock.now_s += 100
    reporter.tick()
    follow(reporter, clock, 130)
    assert [when for when, _, _ in journal.lines] == [0, 100, 120]


def test_a_new_wait_starts_from_the_beginning() -> None:
    reporter, clock, journal = elsewhere()
    reporter.update("waiting", {})
    reporter.clear()
    assert reporter.next_due_s is None
    clock.now_s += 500
    reporter.tick()
    reporter.update("waiting again", {})
    assert [(text, fields["waited_s"]) for _, text, fields in journal.lines] == [
        ("waiting", 0.0),
        ("waiting again", 0.0),
    ]


PROGRAM = """
import sys
from elastic_agent.logs import configure_logging, get_logger, waiting_reporter
now = [0.0]
configure_logging("auto", "info", sys.stderr)
reporter = waiting_reporter(clock=lambda: now[0])
reporter.update("waiting for 1 more node, " + "x" * 300, {"nodes": 1})
now[0] = 1.0
reporter.tick()
get_logger().info("something happened")
now[0] = 75.0
reporter.update("waiting for no node", {"nodes": 2})
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
