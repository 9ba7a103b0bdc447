"""Members of etcd that a machine hosts for its agents: real ones, on addresses of the loopback interface."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_agent.linux import send_signal, start_ticks
from elastic_agent.rendezvous.backends.members.hosting import Hosting
from elastic_agent.transport import Secret
from elastic_agent.values import Endpoint
from tests.etcd import need_etcd, set_up_long_ago
from tests.ports import free_port
from tests.processes import Processes
from tests.rendezvous.member_host import SUPERVISING
from tests.waiting import wait_for

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
LOST = "has lost its data, and cannot join again yet"
SECRET = b"s" * 32


class Machines(Processes):
    """Machines, each with a process that hosts its member."""

    def __init__(self, folder: Path, hosts: tuple[str, ...] = HOSTS, secret: bytes = b"") -> None:
        need_etcd()
        super().__init__(folder)
        port = free_port()
        self.hosts = hosts
        self.endpoint = Endpoint(hosts[0], port, tuple(Endpoint(host, port) for host in hosts[1:]))
        self.secret = secret
        known = Secret((secret,)) if secret else None
        self._observer = Hosting(self.endpoint, folder, known, None)

    def start(self, *hosts: str) -> None:
        for host in hosts:
            command = [sys.executable, "-m", "tests.rendezvous.member_host", str(self.endpoint), host]
            command += [str(self.folder / host), self.secret.hex()]
            self.agents[host] = self.launch(host, command, {})

    def wait_roles(self, *roles: str) -> None:
        """Until the members have these roles, in any order; by default one leads, and all others follow it."""
        expected = sorted(roles or ("leads", *["follows"] * (len(self.hosts) - 1)))
        wait_for(f"{expected}", lambda: self.roles() == expected)

    def roles(self) -> list[str]:
        return sorted(asyncio.run(self._observer.roles()).values())

    def begin(self) -> None:
        """All members of a new cluster."""
        self.start(*self.hosts)
        self.wait_roles()

    def said(self, host: str) -> str:
        """Return what its last agent wrote."""
        return self.agents[host].said()

    def pid(self, host: str) -> int:
        return int(self._file(host, "pid").read_text())

    def stop(self, host: str) -> None:
        self.wait_said(host, SUPERVISING)
        self.agents[host].signal(signal.SIGTERM)
        assert self.wait_end(host) == {host: 0}

    def crash(self, host: str) -> None:
        """The agent is gone, without a chance to end its member."""
        self.agents[host].signal(signal.SIGKILL)
        self.wait_end(host)

    def power_off(self, host: str) -> None:
        """The member is gone, too."""
        self.crash(host)
        send_signal(self.pid(host), signal.SIGKILL)
        wait_for("its end", lambda: start_ticks(self.pid(host)) is None)

    def wipe(self, host: str) -> None:
        shutil.rmtree(self.folder / host)

    def data(self, host: str) -> Path:
        return self._file(host, "data")

    def _file(self, host: str, name: str) -> Path:
        (found,) = (self.folder / host).glob(f"members/*/{name}")
        return found


MakeMachines = Callable[..., Machines]


@pytest.fixture
def make_machines(tmp_path: Path) -> Iterator[MakeMachines]:
    with ExitStack() as made:
        yield lambda **how: made.enter_context(Machines(tmp_path, **how))


@pytest.fixture
def machines(make_machines: MakeMachines) -> Machines:
    return make_machines()


def test_two_begin_without_the_third_which_comes_late(machines: Machines) -> None:
    machines.start(*HOSTS[:2])
    wait_for("a leader", lambda: "leads" in machines.roles())
    machines.start(HOSTS[2])
    machines.wait_roles()


@pytest.mark.parametrize("secret", [b"", SECRET], ids=["open", "secret"])
def test_a_wiped_member_is_replaced(make_machines: MakeMachines, secret: bytes) -> None:
    machines = make_machines(secret=secret)
    machines.begin()
    machines.power_off(HOSTS[2])
    machines.wipe(HOSTS[2])
    machines.start(HOSTS[2])
    machines.wait_roles()


def test_of_five_two_may_be_wiped_one_after_the_other(make_machines: MakeMachines) -> None:
    machines = make_machines(hosts=(*HOSTS, "127.0.0.4", "127.0.0.5"))
    machines.begin()
    for host in HOSTS[:2]:
        machines.power_off(host)
        machines.wipe(host)
        machines.start(host)
    machines.wait_roles()


def test_a_member_outlives_its_agent_and_ends_with_the_next(machines: Machines) -> None:
    machines.begin()
    member = machines.pid(HOSTS[1])
    machines.crash(HOSTS[1])
    machines.start(HOSTS[1])
    machines.wait_roles()
    assert machines.pid(HOSTS[1]) == member
    machines.stop(HOSTS[1])
    assert start_ticks(member) is None


def test_of_two_agents_with_one_state_directory_the_second_takes_over(machines: Machines) -> None:
    machines.begin()
    first, member = machines.agents[HOSTS[0]], machines.pid(HOSTS[0])
    machines.start(HOSTS[0])
    first.signal(signal.SIGTERM)
    assert first.process.wait() == 0
    machines.wait_roles()
    assert machines.pid(HOSTS[0]) != member


@pytest.mark.parametrize("restarted", [False, True], ids=["the third runs on", "the third was restarted"])
def test_two_wiped_members_do_not_begin_anew(machines: Machines, restarted: bool) -> None:
    """Without a majority, the etcd of the third answers no client, once it was restarted.

    As etcd writes with an entry what was agreed before it, something is written first, as agents do all the time.
    """
    machines.begin()
    for _ in range(2):
        set_up_long_ago(str(machines.endpoint), "/elastic-agent")
    for host in HOSTS[1:]:
        machines.power_off(host)
        machines.wipe(host)
    if restarted:
        machines.power_off(HOSTS[0])
        machines.start(HOSTS[0])
        machines.wait_said(HOSTS[0], "knows of no leader, and there is no answer from")
    machines.start(*HOSTS[1:])
    for host in HOSTS[1:]:
        machines.wait_said(host, LOST)
        assert "stop all agents, remove the folder members in every state directory" in machines.said(host)
        assert "hosting the etcd member" not in machines.said(host).partition(LOST)[2]
    assert machines.data(HOSTS[0]).is_dir()


def test_a_port_that_is_taken_is_named(machines: Machines) -> None:
    port = machines.endpoint.port + 1
    with socket.create_server((HOSTS[0], port)):
        machines.start(HOSTS[0])
        machines.wait_said(HOSTS[0], f"port {port}: Address already in use (`ss -ltnp` shows by what)")


def test_a_member_that_was_left_by_an_agent_of_another_list_is_named(
    make_machines: MakeMachines, machines: Machines
) -> None:
    machines.begin()
    machines.crash(HOSTS[0])
    other = make_machines(hosts=(HOSTS[0], "127.0.0.4", "127.0.0.5"))
    other.endpoint = Endpoint(HOSTS[0], machines.endpoint.port, other.endpoint.others)
    left = machines.pid(HOSTS[0])
    other.start(HOSTS[0])
    other.wait_said(HOSTS[0], f"unless an agent there uses it, end it: kill {left}")


def test_what_etcd_says_when_it_ends_is_quoted(machines: Machines) -> None:
    machines.begin()
    machines.power_off(HOSTS[1])
    for file in machines.data(HOSTS[1]).glob("member/wal/*.wal"):
        file.write_bytes(b"damaged")
    machines.start(HOSTS[1])
    machines.wait_said(HOSTS[1], "has ended: ")
    machines.wait_said(HOSTS[1], f"if its data are damaged, remove {machines.data(HOSTS[1])}")
    shutil.rmtree(machines.data(HOSTS[1]))
    machines.wait_roles()


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
