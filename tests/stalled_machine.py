"""Gives a system test a second try if the whole machine stood still during the first one.

A virtual machine may get no processor for seconds. Agents then miss deadlines that they keep otherwise, which is no
verdict about them. A test that fails without such a stall is never repeated.
"""

from __future__ import annotations

import threading
import time

import pytest
from _pytest.runner import runtestprotocol

TICK_S = 0.1
STALL_S = 1.0
"""A tick that comes so late shows that the machine stood still."""


_REPEATED = pytest.StashKey[list[str]]()


class _Watch:
    """Measures, while it is entered, by how much the latest tick of a thread was late."""

    def __enter__(self) -> _Watch:
        self.longest_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _tick(self) -> None:
        last_s = time.monotonic()
        over = False
        while not over:
            over = self._over.wait(TICK_S)
            now_s = time.monotonic()
            self.longest_s = max(self.longest_s, now_s - last_s - TICK_S)
            last_s = now_s


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a system test, and once more if it failed and the machine stood still meanwhile."""
    if item.get_closest_marker("system") is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    with _Watch() as watch:
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if any(report.failed for report in reports) and watch.longest_s > STALL_S:
        item.config.stash.setdefault(_REPEATED, []).append(
            f"{item.nodeid} failed while the machine stood still for {watch.longest_s:.1f} s, and had a second try"
        )
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """List the tests that had a second try."""
    for line in config.stash.get(_REPEATED, []):
        terminalreporter.line(line, yellow=True)
