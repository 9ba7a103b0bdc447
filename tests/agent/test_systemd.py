"""Notifications to systemd about an agent, and their order."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from elastic_agent.agent.reporting.systemd import (
    ANSWER_S,
    LOOK_EVERY_S,
    SystemdReporter,
)
from elastic_agent.protocol import Announce, State
from elastic_agent.rendezvous.events import Registered
from elastic_agent.sd_notify import SystemdNotifier, status
from tests import virtual_time

PATIENCE_S = 10.0


class Manager:
    """A socket as systemd has one, and what came there."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.setblocking(False)
        self.heard: list[str] = []

    def hear(self) -> list[str]:
        """All lines so far, and whatever came since."""
        try:
            while True:
                self.heard += self._socket.recv(4096).decode().splitlines()
        except BlockingIOError:
            return self.heard

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    with closing(Manager(str(tmp_path / "notify"))) as manager:
        yield manager


class Agent:
    """Stands as the events say."""

    def __init__(self, manager: Manager, watchdog_s: float | None = None) -> None:
        self.headline = "connecting to host0:29400"
        self.service = SystemdReporter(SystemdNotifier(manager.address, watchdog_s), lambda: self.headline)
        self._manager = manager

    def run_workers(self) -> None:
        self.headline = "generation 1: 2 nodes, 4 workers"
        self.service.on_event(Registered("life-1", 100.0))
        self.service.on_event(Announce(State.RUNNING, 1))

    async def until(self, line: str) -> float:
        """Wait for this line; how long that took."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        while line not in self._manager.hear():
            assert loop.time() < start_s + PATIENCE_S, f"no {line} in {self._manager.heard}"
            await asyncio.sleep(0.01)
        return loop.time() - start_s


@virtual_time.asynchronous
async def test_it_is_ready_when_workers_run_and_not_before(manager: Manager) -> None:
    """The reactions of a real systemd, to stops, waits for other machines and hangs, too, are in tests/systemd."""
    agent = Agent(manager)
    agent.service.start()
    await agent.until("STATUS=connecting to host0:29400")
    await asyncio.sleep(2 * ANSWER_S)
    assert "READY=1" not in manager.hear()
    agent.run_workers()
    await agent.until("READY=1")
    assert "STATUS=generation 1: 2 nodes, 4 workers" in manager.heard
    assert manager.heard.count("STATUS=connecting to host0:29400") == 1


def test_a_status_is_one_line_for_any_text(manager: Manager) -> None:
    SystemdNotifier(manager.address).notify(status("/data/\udcff\nREADY=1 \x1b[2J \u202e"))
    assert manager.hear() == ["STATUS=/data/\\udcff READY=1 \\x1b[2J \\u202e"]


@virtual_time.asynchronous
async def test_a_short_watchdog_gets_its_keep_alives_in_time(manager: Manager) -> None:
    agent = Agent(manager, watchdog_s=LOOK_EVERY_S / 2)
    agent.run_workers()
    agent.service.start()
    await agent.until("READY=1")
    await agent.until("WATCHDOG=1")
    for _ in range(3):
        manager.heard.clear()
        assert await agent.until("WATCHDOG=1") < LOOK_EVERY_S / 2


@pytest.mark.parametrize(("in_order", "lines"), [(True, ["READY=1"]), (False, [])])
def test_an_agent_that_ends_well_before_it_is_ready_reports_readiness(
    manager: Manager, in_order: bool, lines: list[str]
) -> None:
    Agent(manager).service.ended("finished: every worker\nsucceeded", in_order=in_order)
    assert manager.hear() == [*lines, "STOPPING=1", "STATUS=finished: every worker succeeded"]


@pytest.mark.parametrize(
    ("given", "watchdog_s"),
    [
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
    ids=["ours", "of another process", "zero", "no number", "none"],
)
def test_systemds_variables_are_taken_and_not_inherited(
    given: dict[str, str], watchdog_s: float | None
) -> None:
    environ = {"NOTIFY_SOCKET": "@x", "HOME": "/", **given}
    assert SystemdNotifier.taken_from(environ) == SystemdNotifier("@x", watchdog_s)
    assert environ == {"HOME": "/"}
