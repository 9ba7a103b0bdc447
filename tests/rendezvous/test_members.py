"""Members of etcd that a machine hosts for its agents: real ones, on addresses of the loopback interface."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from elastic_agent.rendezvous.backends.members.hosting import Hosting
from elastic_agent.transport import Secret
from elastic_agent.values import Endpoint
from tests.etcd import need_etcd
from tests.ports import free_port
from tests.waiting import wait_for_async

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
LOST = "has lost its data, and cannot join again yet"


class Machines:
    """Three machines, each with an agent that hosts its member."""

    def __init__(self, folder: Path, secret: Secret | None = None) -> None:
        need_etcd()
        port = free_port()
        self.endpoint = Endpoint(HOSTS[0], port, tuple(Endpoint(host, port) for host in HOSTS[1:]))
        self.folder = folder
        self.secret = secret
        self.agents: dict[str, Hosting] = {}
        self._crashed: list[Hosting] = []

    def start(self, *hosts: str) -> None:
        for host in hosts:
            self.agents[host] = agent = Hosting(self.endpoint, self.folder / host, self.secret, host)
            agent.begin()

    async def wait_roles(self, *roles: str) -> dict[str, str]:
        """Until the members have these roles, in any order."""
        agent = next(iter(self.agents.values()))
        while sorted(found := await agent.roles()) and sorted(found.values()) != sorted(roles):
            await asyncio.sleep(0)
        return found

    def pid(self, host: str) -> int:
        return int(self._file(host, "pid").read_text())

    def crash(self, host: str) -> None:
        """The agent is gone, without a chance to end its member."""
        agent = self.agents.pop(host)
        self._crashed.append(agent)
        for task in agent._tasks:
            task.cancel()
        for member in agent._members:
            if member.is_supervised:
                member._held.close()

    def power_off(self, host: str) -> None:
        """The member is gone, too."""
        self.crash(host)
        os.kill(self.pid(host), signal.SIGKILL)
        self.reap()

    def reap(self) -> None:
        """What init would do for the members of agents that have crashed."""
        for agent in self._crashed:
            for member in agent._members:
                if member._child is not None:
                    member._child.wait()

    def wipe(self, host: str) -> None:
        shutil.rmtree(self.folder / host)

    def _file(self, host: str, name: str) -> Path:
        (found,) = (self.folder / host).glob(f"members/*/{name}")
        return found


@asynccontextmanager
async def three(folder: Path, secret: Secret | None = None) -> AsyncIterator[Machines]:
    machines = Machines(folder, secret)
    try:
        yield machines
    finally:
        for agent in machines.agents.values():
            await agent.end()
        for file in folder.glob("*/members/*/pid"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)
        machines.reap()


class Log:
    """What was logged so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._text = ""

    def count(self, text: str) -> int:
        self._text += self._capsys.readouterr().out
        return self._text.count(text)


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str]) -> Log:
    return Log(capsys)


Story = Callable[[Machines], Coroutine[None, None, None]]


def play(story: Story, folder: Path, secret: Secret | None = None) -> None:
    async def scene() -> None:
        async with three(folder, secret) as machines:
            await story(machines)

    asyncio.run(scene())


def test_two_begin_without_the_third_which_comes_late(tmp_path: Path) -> None:
    async def story(machines: Machines) -> None:
        machines.start(*HOSTS[:2])
        agent = machines.agents[HOSTS[0]]
        while "leads" not in (await agent.roles()).values():
            await asyncio.sleep(0)
        machines.start(HOSTS[2])
        await machines.wait_roles("leads", "follows", "follows")

    play(story, tmp_path)


@pytest.mark.parametrize("secret", [None, Secret((b"s" * 32,))], ids=["open", "secret"])
def test_a_wiped_member_is_replaced(tmp_path: Path, secret: Secret | None) -> None:
    async def story(machines: Machines) -> None:
        machines.start(*HOSTS)
        await machines.wait_roles("leads", "follows", "follows")
        machines.power_off(HOSTS[2])
        machines.wipe(HOSTS[2])
        machines.start(HOSTS[2])
        await machines.wait_roles("leads", "follows", "follows")

    play(story, tmp_path, secret)


def test_a_member_outlives_its_agent_and_ends_with_the_next(tmp_path: Path) -> None:
    async def story(machines: Machines) -> None:
        machines.start(*HOSTS)
        await machines.wait_roles("leads", "follows", "follows")
        member = machines.pid(HOSTS[1])
        machines.crash(HOSTS[1])
        machines.start(HOSTS[1])
        next_agent = machines.agents[HOSTS[1]]
        await wait_for_async("the next agent to take over", lambda: next_agent.is_supervising)
        assert machines.pid(HOSTS[1]) == member
        await next_agent.end()
        machines.reap()
        with pytest.raises(ProcessLookupError):
            os.kill(member, 0)

    play(story, tmp_path)


def test_of_two_agents_with_one_state_directory_the_second_takes_over(tmp_path: Path) -> None:
    async def story(machines: Machines) -> None:
        machines.start(*HOSTS)
        await machines.wait_roles("leads", "follows", "follows")
        first = machines.agents[HOSTS[0]]
        machines.start(HOSTS[0])
        second = machines.agents[HOSTS[0]]
        assert not second.is_supervising
        await first.end()
        await wait_for_async("the second to supervise", lambda: second.is_supervising)
        await machines.wait_roles("leads", "follows", "follows")

    play(story, tmp_path)


def test_two_wiped_members_do_not_begin_anew(tmp_path: Path, log: Log) -> None:
    async def story(machines: Machines) -> None:
        machines.start(*HOSTS)
        await machines.wait_roles("leads", "follows", "follows")
        for host in HOSTS[1:]:
            machines.power_off(host)
            machines.wipe(host)
        machines.start(*HOSTS[1:])
        await wait_for_async("both to say so", lambda: log.count(LOST) == 2)

    play(story, tmp_path)


def test_a_port_that_is_taken_is_named(tmp_path: Path, log: Log) -> None:
    async def story(machines: Machines) -> None:
        port = machines.endpoint.port + 1
        with socket.create_server((HOSTS[0], port)):
            machines.start(HOSTS[0])
            await wait_for_async("a line", lambda: log.count(f"port {port}: Address already in use"))

    play(story, tmp_path)


def test_what_etcd_says_when_it_ends_is_quoted(tmp_path: Path, log: Log) -> None:
    async def story(machines: Machines) -> None:
        machines.start(*HOSTS)
        await machines.wait_roles("leads", "follows", "follows")
        machines.power_off(HOSTS[1])
        for file in (tmp_path / HOSTS[1]).glob("members/*/data/member/wal/*.wal"):
            file.write_bytes(b"damaged")
        machines.start(HOSTS[1])
        await wait_for_async(
            "a line", lambda: log.count("has ended: ") and log.count("the others let it join again")
        )
        shutil.rmtree(next((tmp_path / HOSTS[1]).glob("members/*/data")))
        await machines.wait_roles("leads", "follows", "follows")

    play(story, tmp_path)


def test_a_machine_without_etcd_is_told_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    cluster = Endpoint(HOSTS[0], 29400, (Endpoint(HOSTS[1], 29400), Endpoint(HOSTS[2], 29400)))
    with pytest.raises(ValueError, match="apt install etcd-server"):
        Hosting(cluster, tmp_path, None, None)
    elsewhere = Endpoint(
        "198.51.100.1", 29400, (Endpoint("198.51.100.2", 29400), Endpoint("198.51.100.3", 29400))
    )
    Hosting(elsewhere, tmp_path, None, None)
