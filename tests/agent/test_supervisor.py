"""What the agent's loop makes of trouble and of commands, with a real session, store and guard."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from elastic_agent.agent.control.commands import Commands
from elastic_agent.agent.control.socket import Command
from elastic_agent.agent.events import (
    DrainRequested,
    Event,
    NoticeGiven,
    Publisher,
)
from elastic_agent.agent.local_node import LocalNode
from elastic_agent.agent.reporting.log_lines import log_event
from elastic_agent.agent.reporting.run_observer import RunObserver
from elastic_agent.agent.supervisor import Supervisor
from elastic_agent.agent.worker_group.collectives import Collectives
from elastic_agent.agent.worker_group.interruptions import StopSignals
from elastic_agent.agent.worker_group.runner import Runner
from elastic_agent.agent.worker_group.warm_start import Guards
from elastic_agent.client._cells import HeartbeatFile, claim_cell
from elastic_agent.client._notice import DEADLINE_NS, NOTICE
from elastic_agent.config.settings import Settings
from elastic_agent.linux import boottime_s
from elastic_agent.protocol import Activity, Cause, Depart
from elastic_agent.protocol.records import RECORD_VERSION, Member, Phase, Plan, State, World
from elastic_agent.rendezvous.backends import BackendOptions
from elastic_agent.rendezvous.backends.c10d.backend import C10dBackend
from elastic_agent.rendezvous.events import LeaseLost, PlanSeen, Prepared, Registered
from elastic_agent.rendezvous.run_history import RunHistoryStore
from elastic_agent.rendezvous.session import Session
from elastic_agent.transport.blocking_call import DiskThread
from elastic_agent.values import Endpoint
from elastic_agent.workers.context import BackgroundCloser, WorkerContext
from elastic_agent.workers.guard.client import Guard, Spawned
from elastic_agent.workers.output.generation_logs import GenerationLogs
from tests.agent.support import asynchronous
from tests.ports import free_port
from tests.rendezvous.support import HostProcess, Participant, hosted, policy
from tests.waiting import GUARD_S, wait_for_async

NEVER_FULL = 1000


class HangingDisk(RunHistoryStore):
    """A state directory on a file server that may stop answering."""

    def __init__(self, state_dir: Path) -> None:
        super().__init__(state_dir)
        self.answers, self.asked = threading.Event(), threading.Event()
        self.answers.set()

    def _write(self, run_id: str, history: Plan) -> None:
        self.asked.set()
        assert self.answers.wait(GUARD_S)
        super()._write(run_id, history)


class Scene:
    """A supervisor; what it wrote down, and whether it can. Without a program its node waits for a second one."""

    def __init__(
        self,
        endpoint: Endpoint,
        folder: Path,
        program: str = "",
        *,
        lease_s: float = 60.0,
        nodes: tuple[int, int] | None = None,
    ) -> None:
        """``nodes``: the least and the most, if there may be more than this one."""
        self._folder, self._program = folder, program
        self._guards = Guards(Guard.start(), Guard.start)
        self.written: list[str] = []
        self.most_written = NEVER_FULL
        """The disk has room for so many notes of who registers."""
        self.disk_patience_s = GUARD_S
        self.disk = HangingDisk(folder)
        self.events: list[Event] = []
        self._news = asyncio.Event()
        self._registered: asyncio.Queue[str] = asyncio.Queue()
        backend = C10dBackend(BackendOptions(endpoint, folder))
        backend.run_id = "run"
        backend.history_store = self.disk
        self._thread = DiskThread("node-record")
        self.rules = policy(*(nodes or ((1, 1) if program else (2, 2))), lease_s=lease_s)
        member = Member(RECORD_VERSION, "a", "a-1", "127.0.0.1", 1, State.READY, 0, self.rules)
        settings = Settings(shutdown_timeout=0.1, hang_timeout=0.0)
        self.supervisor = Supervisor(
            Session(backend, member, lease_s),
            Runner(self._guards, "a", settings, StopSignals(), Collectives()),
            self._make_workers,
            publish=Publisher(log_event, self._take_in),
            remember=backend.remember,
            write_down=self._write_down,
        )

    @property
    def guard(self) -> Guard:
        """The present one."""
        return self._guards.present

    async def __aenter__(self) -> Scene:
        self.life = asyncio.create_task(self.supervisor.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.life.cancel()
        await asyncio.gather(self.life, return_exceptions=True)
        self.disk.answers.set()
        self.guard.close()

    def _take_in(self, event: Event) -> None:
        self.events.append(event)
        self._news.set()
        if isinstance(event, Registered):
            self._registered.put_nowait(event.incarnation)

    async def registered(self) -> str:
        """The incarnation that registers next."""
        return await asyncio.wait_for(self._registered.get(), GUARD_S)

    async def happened(self, test: Callable[[Event], bool]) -> Event:
        """The first event that passes."""
        async with asyncio.timeout(GUARD_S):
            while not (passed := [*filter(test, self.events)]):
                self._news.clear()
                await self._news.wait()
        return passed[0]

    def _make_workers(
        self,
        guard: Guard,
        world: World,
        incarnation: str,
        restarts: int,
        parked: object,
        number: int | None,
    ) -> tuple[WorkerContext, HeartbeatFile]:
        assert self._program, "there is no second node"
        arguments = {0: ("-I", "-S", "-c", self._program, world.generation)}
        logs = GenerationLogs(str(self._folder / "logs"))
        envs = {
            0: {
                f"ELASTIC_AGENT_{name}": str(world.generation) for name in ("RUN_ID", "NODE_ID", "GENERATION")
            }
        }
        context = WorkerContext(
            guard, world.generation, "w", sys.executable, arguments, envs, logs, BackgroundCloser()
        )
        self.heartbeats = HeartbeatFile.create(self._folder, 1)
        return context, self.heartbeats

    async def _write_down(self, incarnation: str) -> None:
        def record() -> None:
            assert self.disk.answers.wait(GUARD_S)
            if len(self.written) >= self.most_written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.written.append(incarnation)

        await self._thread.call_async("seat", record, self.disk_patience_s)


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint("127.0.0.1", free_port())


@pytest.fixture
def host(endpoint: Endpoint, tmp_path: Path) -> Iterator[HostProcess]:
    with hosted(endpoint, tmp_path / "host") as opened:
        yield opened


@asynchronous
async def test_a_node_that_lost_its_lease_rejoins_although_the_disk_is_full(
    endpoint: Endpoint, host: HostProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with Scene(endpoint, tmp_path, lease_s=2.0) as here:
        here.most_written = 1
        assert await here.registered() == "a-1"
        assert here.written == ["a-1"]
        await here.happened(lambda event: isinstance(event, PlanSeen))
        host.freeze()
        await here.happened(lambda event: isinstance(event, LeaseLost))
        host.thaw()
        assert await here.registered() != "a-1"
    assert "cannot write the state directory" in "".join(capsys.readouterr())


@pytest.mark.parametrize("disk", ["written down", "disk full", "disk hangs"])
@asynchronous
async def test_a_new_guard_starts_no_workers_before_it_is_recorded_on_disk(
    endpoint: Endpoint, host: HostProcess, tmp_path: Path, disk: str
) -> None:
    """A successor that finds the old guard gone would take the workers of the new one for gone."""
    async with Scene(endpoint, tmp_path) as here:
        await here.registered()
        here.most_written = 1 if disk == "disk full" else NEVER_FULL
        if disk == "disk hangs":
            here.disk.answers.clear()
            here.disk_patience_s = 0.5
        old = here.guard
        os.kill(old.pid, signal.SIGKILL)
        if disk != "written down":
            assert await here.registered() != "a-1"
        else:
            await wait_for_async("the new guard's record", lambda: here.written == ["a-1", "a-1"])
            assert here.supervisor.node.incarnation == "a-1"
        assert here.guard is not old


RUNS_ON = "import time; time.sleep(600)"


@asynchronous
async def test_workers_whose_start_waits_for_the_disk_get_the_notice_that_came_meanwhile(
    endpoint: Endpoint, host: HostProcess, tmp_path: Path
) -> None:
    async with Scene(endpoint, tmp_path, RUNS_ON) as here:
        await here.happened(lambda event: isinstance(event, Spawned) and event.generation == 1)
        here.disk.answers.clear()
        os.kill(here.guard.pid, signal.SIGKILL)
        await here.happened(lambda event: isinstance(event, Prepared) and event.generation == 2)
        stopped_s = boottime_s() + 60.0
        here.supervisor.stop(Cause.PREEMPTED, 60.0, "the machine is reclaimed")
        await here.happened(lambda event: isinstance(event, PlanSeen) and event.plan.notice is not None)
        came_s = boottime_s()
        here.disk.answers.set()
        await here.happened(lambda event: isinstance(event, Spawned) and event.generation == 2)
        cell = claim_cell(here.heartbeats.path, 0)
        assert cell is not None
        assert cell[NOTICE] > 0
        assert stopped_s <= cell[DEADLINE_NS] / 1e9 <= came_s + 60.0, "the wait is not added to the time"
        assert [event.workers.is_delivered for event in here.events if isinstance(event, NoticeGiven)] == [
            True
        ]


def commands_to(supervisor: Supervisor) -> Commands:
    """What is typed at the agent of node a."""
    node = SimpleNamespace(
        run_id="run",
        node_id="a",
        settings=SimpleNamespace(shutdown_timeout=60.0, notice_time=60.0),
        backend=SimpleNamespace(shown="host0", busy_with=[], is_at_store=lambda seat: False),
        console=SimpleNamespace(last_problem=""),
        scheduled=None,
    )
    return Commands(cast(LocalNode, node), supervisor, cast(RunObserver, None))


def begins_after(generation: int, event: Event) -> bool:
    """Return whether a plan starts the workers of a later generation."""
    plan = event.plan if isinstance(event, PlanSeen) else None
    return plan is not None and plan.phase is Phase.RUNNING and plan.generation > generation


def seats_in(supervisor: Supervisor) -> list[str]:
    """The nodes of the newest world."""
    plan = supervisor.node.plan
    return [seat.node_id for seat in plan.world.seats] if plan is not None and plan.world is not None else []


@asynchronous
async def test_a_drain_of_another_node_returns_when_that_node_has_left_and_the_next_world_is_without_it(
    endpoint: Endpoint, host: HostProcess, tmp_path: Path
) -> None:
    """A failure that follows begins the next world in any case: a node that was not told to leave would be in it."""
    answers: list[str] = []
    async with (
        Scene(endpoint, tmp_path, RUNS_ON, nodes=(1, 2)) as here,
        Participant("b", endpoint, here.rules, tmp_path / "b") as b,
    ):
        first = (await b.running("a", "b")).generation
        started = await here.happened(lambda event: isinstance(event, Spawned) and event.generation == first)
        assert isinstance(started, Spawned)

        async def drain() -> Activity:
            async for answer in commands_to(here.supervisor).act(Command("drain", "b", left_s=60.0)):
                answers.append(answer.text)
            return b.node.activity

        command = asyncio.create_task(drain())
        await here.happened(lambda event: isinstance(event, DrainRequested))
        os.kill(started.pids[0], signal.SIGKILL)
        await here.happened(lambda event: isinstance(event, Depart) or begins_after(first, event))
        assert seats_in(here.supervisor) == ["a"]
        here.supervisor.stop(Cause.OPERATOR, 0.0, "the test ends")
        await here.life
        assert await command is Activity.GONE
    assert answers == [
        "run run: draining b; workers that handle notices have 60 s to save",
        "run run: b has left; the other nodes continue; to have it join again, start the same command there again",
    ]
