"""What systemd hears of an agent, and when."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from elastic_agent.agent.events import Event, Hosting, LeaveSignalled
from elastic_agent.agent.reporting.systemd import (
    ANSWER_S,
    LOOK_EVERY_AT_START_S,
    LOOK_EVERY_S,
    SystemdReporter,
)
from elastic_agent.protocol import Announce, State
from elastic_agent.rendezvous.events import Registered
from elastic_agent.sd_notify import SystemdNotifier, status
from tests import virtual_time

REGISTERED = Registered("life-1", 100.0)
RUNNING = Announce(State.RUNNING, 1)
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

    def fileno(self) -> int:
        return self._socket.fileno()

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

    def tell(self, *events: Event) -> None:
        for event in events:
            self.service.on_event(event)

    def run_workers(self) -> None:
        self.headline = "generation 1: 2 nodes, 4 workers"
        self.tell(REGISTERED, RUNNING)

    async def until(self, line: str) -> float:
        """Wait for this line; how long that took."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        start_s = loop.time()
        loop.add_reader(self._manager.fileno(), arrived.set)
        try:
            while line not in self._manager.hear():
                arrived.clear()
                await asyncio.wait_for(arrived.wait(), start_s + PATIENCE_S - loop.time())
        except TimeoutError:
            raise AssertionError(f"no {line} in {self._manager.heard}") from None
        finally:
            loop.remove_reader(self._manager.fileno())
        return loop.time() - start_s


@virtual_time.asynchronous
async def test_it_is_ready_when_workers_run_and_not_before(manager: Manager) -> None:
    agent = Agent(manager)
    agent.service.start()
    await agent.until("STATUS=connecting to host0:29400")
    await asyncio.sleep(2 * ANSWER_S)
    assert "READY=1" not in manager.hear()
    agent.run_workers()
    await agent.until("READY=1")
    assert "STATUS=generation 1: 2 nodes, 4 workers" in manager.heard
    assert manager.heard.count("STATUS=connecting to host0:29400") == 1
    assert [line for line in manager.heard if line.startswith("WATCHDOG")] == []


@virtual_time.asynchronous
async def test_a_notification_that_systemd_did_not_accept_is_repeated(manager: Manager) -> None:
    agent = Agent(manager)
    agent.run_workers()
    sent = 0
    while SystemdNotifier(manager.address).notify(f"NUMBER={sent}"):
        sent += 1
    agent.service.start()
    await asyncio.sleep(2 * LOOK_EVERY_AT_START_S)
    assert "READY=1" not in manager.hear()
    await agent.until("READY=1")
    assert "STATUS=generation 1: 2 nodes, 4 workers" in manager.heard


def test_a_status_is_one_line_for_any_text(manager: Manager) -> None:
    SystemdNotifier(manager.address).notify(status("/data/\udcff\nREADY=1 \x1b[2J \u202e"))
    assert manager.hear() == ["STATUS=/data/\\udcff READY=1 \\x1b[2J \\u202e"]


@virtual_time.asynchronous
async def test_it_is_ready_when_it_waits_for_others_and_was_not_refused_at_once(manager: Manager) -> None:
    agent = Agent(manager)
    agent.tell(REGISTERED)
    agent.service.start()
    assert await agent.until("READY=1") >= ANSWER_S


@virtual_time.asynchronous
async def test_the_timeout_is_extended_while_dialling_and_stopping_but_not_while_hosting(
    manager: Manager,
) -> None:
    more = "EXTEND_TIMEOUT_USEC=60000000"
    agent = Agent(manager)
    agent.service.start()
    await agent.until(more)
    agent.run_workers()
    await agent.until("READY=1")
    manager.heard.clear()
    agent.tell(LeaveSignalled("SIGTERM received"))
    await agent.until("STATUS=SIGTERM received: generation 1: 2 nodes, 4 workers")
    assert {"STOPPING=1", more} <= {*manager.heard}

    manager.heard.clear()
    host = Agent(manager)
    host.run_workers()
    host.tell(Hosting(("run",)))
    host.tell(LeaveSignalled("SIGTERM received"))
    await host.until("STOPPING=1")
    assert more not in manager.hear()


@virtual_time.asynchronous
async def test_a_hanging_loop_sends_no_keep_alive(manager: Manager) -> None:
    agent = Agent(manager, watchdog_s=2 * LOOK_EVERY_S)
    agent.run_workers()
    threads = {*threading.enumerate()}
    agent.service.start()
    await agent.until("WATCHDOG=1")
    manager.heard.clear()
    await agent.until("WATCHDOG=1")
    assert {*threading.enumerate()} <= threads, "a thread would send keep-alives while the loop hangs"


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


@virtual_time.asynchronous
async def test_without_systemd_nothing_is_sent() -> None:
    service = SystemdReporter(SystemdNotifier(), lambda: pytest.fail("the headline must not be computed"))
    service.start()
    service.ended("finished", in_order=True)


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
