"""Records, raw connections and other processes for the transport's tests."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, Protocol, TypeVar

import pytest
from torch.distributed import TCPStore

from elastic_agent.protocol import encode
from elastic_agent.protocol.records import Address, Lease, Member, Phase, Plan, Policy, Seat, World
from elastic_agent.transport import (
    CoordinatorRecords,
    LifeKeys,
    NodeRecords,
    RunKeys,
    Secret,
    Table,
    begun_life_of,
    c10d,
)
from elastic_agent.transport.addresses import listen
from elastic_agent.transport.c10d import dialling
from elastic_agent.values import Endpoint
from tests.loop_thread import Blocking, in_loop
from tests.ports import free_port
from tests.processes import Forked
from tests.protocol import support as protocol

PATIENCE_S = 100.0
"""A time that nothing takes unless something is broken."""

P = ParamSpec("P")
T = TypeVar("T")


def member(name: str, **changes: Any) -> Member:
    said = {"address": "127.0.0.1", "slots": 2, "policy": Policy(), "bootstrap": None}
    return protocol.member(f"node-{name}", name, **(said | changes))


def lease(name: str, **changes: Any) -> Lease:
    return Lease(name, 5.0, **changes)


def world(nodes: int, generation: int = 1) -> World:
    seats = tuple(Seat(f"n{i}", f"i{i}-{generation}", "127.0.0.1", 2, 2 * i) for i in range(nodes))
    return World(generation, seats, Address("127.0.0.1", 4000), "n0")


def plan(version: int, reason: str = "because", **changes: Any) -> Plan:
    said = {"phase": Phase.FORMING, "generation": version, "reason": reason, "policy": Policy()} | changes
    return protocol.plan(said.pop("phase"), said.pop("generation"), version, **said)


def forge(store: Any, folder: str, *plans: Plan) -> None:
    """Write plans as a coordinator would, whatever is there; the last one as the newest.

    ``store``: what has ``put``; ``folder``: of the run's records.
    """
    for forged in plans:
        store.put(f"{folder}plan", encode(forged))
        store.put(f"{folder}bell/{forged.version}", b"1")


def beside(work: Callable[[], T]) -> Future[T]:
    """Have a call made by a thread of its own."""
    future: Future[T] = Future()

    def make() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=make, daemon=True).start()
    return future


def life_keys(table: Table, run_id: str = "run") -> LifeKeys:
    """Return the keys of the present life of a run, which begins now if there is none."""
    run = RunKeys(run_id)
    return LifeKeys(run, in_loop(begun_life_of(table, run)))


class Stranger(Protocol):
    """A client that writes by hand what agents never write."""

    def set(self, key: str, value: bytes) -> object: ...

    def delete_key(self, key: str) -> object: ...


class Scene(ABC):
    """A store of one kind, and its clients."""

    complaints: list[str]
    """The invalid records that connections found in the store."""

    @abstractmethod
    def table(self) -> Any:
        """Open a connection of its own."""

    def node(self, run_id: str = "run") -> Any:
        """Open a node's connection."""
        return Blocking(in_loop(NodeRecords.open(self.table(), run_id, self.complaints.append)))

    @abstractmethod
    def coordinator(self, run_id: str = "run") -> Any:
        """Open a connection of the coordinator."""

    @abstractmethod
    def reports(self, run_id: str = "run") -> Any:
        """Open a connection for reports."""

    @abstractmethod
    def beside(self) -> Any:
        """Open the table of a program that is no part of the run."""

    def end_run(self) -> None:
        """Have the coordinator remove the run."""
        self.coordinator().remove_run(None)

    @abstractmethod
    def hints(self, run_id: str = "run") -> Callable[[float], list[str]]:
        """Waits, for at most the given time, for hints to the run's coordinator; from the beginning on."""

    @abstractmethod
    def stranger(self) -> Stranger:
        """Open a plain connection."""

    def root(self, run_id: str = "run") -> str:
        """Return the key under which the present life of the run's records lies."""
        table = self.table()
        return f"{table.root}{life_keys(table, run_id).folder}".removesuffix("/")

    def forge(self, *plans: Plan) -> None:
        """Write plans of the run by hand, whatever is there; the last one as the newest."""
        table = self.table()
        forge(Blocking(table), life_keys(table).folder, *plans)

    @abstractmethod
    def lose_store(self) -> None:
        """End the store while clients use it."""

    def joined(self, *names: str, run_id: str = "run") -> Any:
        """Open a node's connection, and register these over it."""
        node = self.node(run_id)
        for name in names:
            assert node.register(member(name), lease(name)) is not None
        return node


class C10dScene(Scene):
    """A store in this process."""

    def __init__(self, address: str = "127.0.0.1", secret: Secret | None = None) -> None:
        self.secret = secret
        self.host = in_loop(c10d.C10dHost.make(listen(address, 0), secret, alone=secret is None))
        self.endpoint = Endpoint(address, self.host.port)
        self.complaints: list[str] = []
        self._heard: dict[str, list[str]] = {}

    def table(self) -> c10d.C10dTable:
        return in_loop(c10d.open_table(self.endpoint, PATIENCE_S, self.secret))

    def coordinator(self, run_id: str = "run") -> Any:
        table = self.table()
        return Blocking(CoordinatorRecords(table, life_keys(table, run_id), self.complaints.append))

    def beside(self) -> Any:
        return Blocking(in_loop(c10d.open_table(self.endpoint, PATIENCE_S, self.secret, "tests/")))

    def reports(self, run_id: str = "run") -> Any:
        return Blocking(in_loop(c10d.dial_reports(self.endpoint, run_id, PATIENCE_S, self.secret)))

    def inbox(self) -> Any:
        """Open the inbox of the coordinators of all runs."""
        return Blocking(in_loop(self.host.inbox()))

    def hints(self, run_id: str = "run") -> Callable[[float], list[str]]:
        inbox = self.inbox()

        def wait(timeout_s: float) -> list[str]:
            if not self._heard.get(run_id):
                for run, name in inbox.wait(timeout_s):  # one inbox for all runs
                    self._heard.setdefault(run, []).append(name)
            return self._heard.pop(run_id, [])

        return wait

    def stranger(self) -> Any:
        return raw_client(self.endpoint) if self.secret is None else _Insider(self)

    def lose_store(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the store."""
        Blocking(self.host).close()


class _Insider:
    """One that has the secret."""

    def __init__(self, scene: C10dScene) -> None:
        self._table = scene.table()

    def set(self, key: str, value: bytes) -> None:
        in_loop(self._table.put(key.removeprefix(self._table.root), value))

    def delete_key(self, key: str) -> None:
        in_loop(self._table.delete([key.removeprefix(self._table.root)]))


class TorchStore(TCPStore):
    """Torch's client. What it has written is there for the clients of other connections."""

    def __init__(self, endpoint: Endpoint, *, hosts: bool = False) -> None:
        """Connect to a store, or host it."""
        patience = timedelta(seconds=PATIENCE_S)
        super().__init__(endpoint.host, endpoint.port, None, hosts, patience, wait_for_workers=False)

    def set(self, key: str, value: bytes | str) -> None:
        super().set(key, value)  # type: ignore[arg-type]  # the stubs know only text
        self.check([key])  # a set is not answered; this call is, after it

    def append(self, key: str, value: bytes | str) -> None:
        super().append(key, value)  # type: ignore[arg-type]
        self.check([key])

    def queue_push(self, queue: str, item: bytes | str) -> None:
        super().queue_push(queue, item)  # type: ignore[arg-type]
        self.check([queue])


def torchs_server() -> TorchStore:
    """Host a store in this process, as torchrun does."""
    return TorchStore(Endpoint("127.0.0.1", 0), hosts=True)


def raw_client(endpoint: Endpoint) -> Any:
    """Return a client that writes past every check."""
    return TorchStore(endpoint)


# -- other programs ------------------------------------------------------------------------------


@contextmanager
def program(talk: Callable[[socket.socket], object]) -> Iterator[Endpoint]:
    """Run a server that says what ``talk`` says on each connection, then closes it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with sock, suppress(OSError):
                    talk(sock)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield Endpoint("127.0.0.1", listener.getsockname()[1])
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(PATIENCE_S)


def says(text: bytes, *, first: bool = False) -> Callable[[socket.socket], None]:
    """Return what says this once it was spoken to, or ``first``; an empty text: nothing, until the client hangs up."""

    def talk(sock: socket.socket) -> None:
        if not first:
            sock.recv(1000)
        sock.sendall(text)
        if first or not text:
            sock.recv(1000)

    return talk


# -- other processes -----------------------------------------------------------------------------

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and iproute2"
)


def in_a_namespace(script: str, *arguments: str) -> str:
    """Run a shell script, as ``$0`` with this Python, on a network of its own; return what it prints."""
    command = ["unshare", "--net", "--mount", "sh", "-c", script, sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Forked from a server that has imported torch once: a second each would be most of these tests' time.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["elastic_agent.transport.c10d", "tests.transport.support"])


def in_another_process(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what a function of a module returns there."""
    with ProcessPoolExecutor(1, mp_context=_processes) as pool:
        return pool.submit(function, *args, **kwargs).result(PATIENCE_S)


class Peer(Forked):
    """A process that takes part in elections at an endpoint when told to."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.connection, theirs = _processes.Pipe()
        self.process = _processes.Process(target=_take_part, args=(theirs, endpoint), daemon=True)
        self.process.start()
        theirs.close()
        assert self.hear() == "born"

    def ask(self) -> None:
        """Have it look for a store or host one."""
        self.connection.send("elect")

    def hear(self) -> Any:
        assert self.connection.poll(PATIENCE_S), "the other process says nothing"
        return self.connection.recv()

    def elect(self) -> tuple[bool, str]:
        """Return whether it hosts, and the store that it finds at the endpoint."""
        self.ask()
        hosts, store_id = self.hear()
        return hosts, store_id


@contextmanager
def peers(count: int, endpoint: Endpoint) -> Iterator[list[Peer]]:
    """Processes at an endpoint, gone in the end."""
    started: list[Peer] = []
    try:
        for _ in range(count):
            started.append(Peer(endpoint))
        yield started
    finally:
        for peer in started:
            peer.kill()
            peer.connection.close()


def _take_part(connection: Connection, endpoint: Endpoint) -> None:
    dialling.BIRTH_S = PATIENCE_S  # the store may be one that another process is only starting
    connection.send("born")
    host = None
    with suppress(EOFError):
        while connection.recv() == "elect":
            if host is None:
                host = in_loop(c10d.find_or_host(endpoint, PATIENCE_S))
            table = in_loop(c10d.open_table(endpoint, PATIENCE_S))
            Blocking(table).close()
            connection.send((host is not None, table.store_id))
    os._exit(0)


def free_endpoint() -> Endpoint:
    """Return one without a listener."""
    return Endpoint("127.0.0.1", free_port())
