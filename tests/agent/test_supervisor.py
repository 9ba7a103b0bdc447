"""What the agent's loop makes of trouble, with a real session, store and guard."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_agent.agent.reporting.console import ConsoleReporter
from elastic_agent.agent.supervisor import Graces, Parts, Supervisor
from elastic_agent.agent.worker_group.interruptions import StopSignals
from elastic_agent.agent.worker_group.runner import Runner
from elastic_agent.linux import boottime_s
from elastic_agent.protocol.records import RECORD_VERSION, History, Member, State, World
from elastic_agent.rendezvous.backends.c10d.backend import C10dBackend
from elastic_agent.rendezvous.disk_thread import DiskThread
from elastic_agent.rendezvous.run_history import BoundedRunHistoryStore, RunHistoryStore
from elastic_agent.rendezvous.session import Session
from elastic_agent.values import Endpoint
from elastic_agent.workers.guard.client import Guard
from tests.ports import free_port
from tests.rendezvous.support import LEASE_S, PATIENCE_S, HostProcess, hosted, policy


class HangingDisk(RunHistoryStore):
    """A state directory on a file server that may stop answering."""

    def __init__(self, state_dir: Path) -> None:
        super().__init__(state_dir)
        self.answers, self.asked = threading.Event(), threading.Event()
        self.answers.set()

    def save(self, run_id: str, history: History) -> None:
        self.asked.set()
        assert self.answers.wait(PATIENCE_S)
        super().save(run_id, history)


class Scene:
    """A supervisor whose node waits for a second one; what it wrote down, and whether it can."""

    def __init__(self, endpoint: Endpoint, folder: Path) -> None:
        self.guard = Guard.start()
        self.written: list[str] = []
        self.disk_is_full = False
        self.disk = HangingDisk(folder)
        self.plan_seen = asyncio.Event()
        self._registered: asyncio.Queue[str] = asyncio.Queue()
        backend = C10dBackend(endpoint, folder, port_range=None, port_rest_s=0.0)
        backend.set_run_id("run")
        backend.history_store = BoundedRunHistoryStore(self.disk)
        self._thread = DiskThread("node-record")
        member = Member(RECORD_VERSION, "a", "a-1", "127.0.0.1", 1, State.READY, 0, policy(2, 2))
        parts = Parts(
            guard=self.guard,
            session=Session(backend, member, LEASE_S),
            event_log=self,  # type: ignore[arg-type]
            console=ConsoleReporter("here", self._status),
            graces=Graces(0.1, 0.1),
            start_workers=self._start_workers,
            new_guard=self._new_guard,
            remember=backend.remember,
            write_down=self._write_down,
            stop_signals=StopSignals(),
            join_timeout_s=PATIENCE_S,
        )
        self.supervisor = Supervisor(parts, "a", "a-1", 0.0)

    def write(self, event: str, **details: object) -> None:
        """As a journal."""
        if event == "registered":
            self._registered.put_nowait(str(details["incarnation"]))
        if event == "plan":
            self.plan_seen.set()

    async def registered(self) -> str:
        """The incarnation that registers next."""
        return await asyncio.wait_for(self._registered.get(), PATIENCE_S)

    @staticmethod
    async def _status() -> str:
        return ""

    @staticmethod
    def _start_workers(world: World, runner: Runner) -> None:
        raise AssertionError("there is no second node")

    def _new_guard(self) -> Guard:
        self.guard = Guard.start()
        return self.guard

    async def _write_down(self, incarnation: str) -> None:
        def record() -> None:
            assert self.disk.answers.wait(PATIENCE_S)
            if self.disk_is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.written.append(incarnation)

        await self._thread.call_async("seat", record, 0.5)


@contextmanager
def scene(endpoint: Endpoint, folder: Path) -> Iterator[Scene]:
    opened = Scene(endpoint, folder)
    try:
        yield opened
    finally:
        opened.disk.answers.set()
        opened.guard.close()


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint("127.0.0.1", free_port())


@pytest.fixture
def host(endpoint: Endpoint, tmp_path: Path) -> Iterator[HostProcess]:
    with hosted(endpoint, tmp_path / "host") as opened:
        yield opened


def test_a_node_that_lost_its_lease_comes_again_although_the_disk_is_full(
    endpoint: Endpoint, host: HostProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def story() -> None:
        with scene(endpoint, tmp_path) as here:
            life = asyncio.create_task(here.supervisor.run())
            assert await here.registered() == "a-1"
            assert here.written == ["a-1"]
            await asyncio.wait_for(here.plan_seen.wait(), PATIENCE_S)
            here.disk_is_full = True
            host.freeze()
            await asyncio.sleep(LEASE_S)
            host.thaw()
            again = await here.registered()
            assert again == here.supervisor.node.incarnation != "a-1"
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)

    asyncio.run(story())
    assert "cannot write the state directory" in "".join(capsys.readouterr())


def test_a_state_directory_that_hangs_costs_no_lease(
    endpoint: Endpoint, host: HostProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def story() -> None:
        with scene(endpoint, tmp_path) as here:
            here.disk.answers.clear()
            life = asyncio.create_task(here.supervisor.run())
            assert await here.registered() == "a-1"
            assert await asyncio.to_thread(here.disk.asked.wait, PATIENCE_S), "a plan is to be remembered"
            until_s = boottime_s() + 2 * LEASE_S
            while (deadline_s := here.supervisor._parts.session.deadline_s) is None or deadline_s < until_s:
                await asyncio.sleep(0.05)
                assert boottime_s() < until_s, "the lease was not renewed"
            assert here.supervisor.node.incarnation == "a-1"
            here.disk.answers.set()
            while not here.written or here.disk.load("run") is None:
                await asyncio.sleep(0.01)  # what was to be written is written when the disk is back
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)

    asyncio.run(story())
    assert "cannot write the state directory" in "".join(capsys.readouterr())


@pytest.mark.parametrize("disk", ["written down", "disk full", "disk hangs"])
def test_a_new_guard_starts_nothing_for_an_incarnation_that_names_the_old_one_on_disk(
    endpoint: Endpoint, host: HostProcess, tmp_path: Path, disk: str
) -> None:
    """A successor that finds the old guard gone would take the workers of the new one for gone."""

    async def story() -> None:
        with scene(endpoint, tmp_path) as here:
            life = asyncio.create_task(here.supervisor.run())
            await here.registered()
            here.disk_is_full = disk == "disk full"
            if disk == "disk hangs":
                here.disk.answers.clear()
            old = here.guard
            os.kill(old.pid, signal.SIGKILL)
            if disk != "written down":
                assert await here.registered() != "a-1"
            else:
                while here.written != ["a-1", "a-1"]:
                    await asyncio.sleep(0.01)  # the guard's end comes through its pipe
                assert here.supervisor.node.incarnation == "a-1"
            assert here.guard is not old
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)

    asyncio.run(story())
