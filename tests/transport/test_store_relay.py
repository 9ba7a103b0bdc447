"""A bootstrap store on a loopback address, which other users of the machine do not reach."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import structlog
from torch.distributed import TCPStore

from elastic_agent.protocol.records import Address
from elastic_agent.transport import is_local, peers, resolve
from elastic_agent.transport.c10d.bootstrap import BootstrapStore, PortPicker, dial_bootstrap
from elastic_agent.transport.peers import admit_only, peer_uid
from elastic_agent.values import Endpoint

from .support import raw_client

OTHER_UID = 61003

CONNECTS = """
import encodings.idna, os, socket, sys  # all that cannot be read later
os.setuid(int(sys.argv[1]))
with socket.create_connection((sys.argv[2], int(sys.argv[3])), 5) as sock:
    sock.sendall(bytes.fromhex(sys.argv[4]))
    try:
        print(sock.recv(1))
    except ConnectionResetError:  # closed before what was sent was read
        print(b"")
"""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def store() -> Iterator[BootstrapStore]:
    opened = BootstrapStore.open("127.0.0.1", PortPicker(None, 0.0))
    yield opened
    opened.close()


def client(store: BootstrapStore) -> TCPStore:
    return raw_client(Endpoint(store.address.host, store.address.port))


def connect_as(uid: int, address: Address, says: bytes = b"") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CONNECTS, str(uid), address.host, str(address.port), says.hex()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def listening_at(port: int) -> list[str]:
    """The addresses at which this machine listens on a port, as every user can see them."""
    found = []
    with open("/proc/net/tcp") as table:
        for line in table.readlines()[1:]:
            host, _, at = line.split()[1].partition(":")
            if int(at, 16) == port and line.split()[3] == "0A":
                found.append(socket.inet_ntoa(int(host, 16).to_bytes(4, sys.byteorder)))
    return sorted(found)


@as_root
def test_another_user_is_refused_and_reported_once(store: BootstrapStore) -> None:
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            done = connect_as(OTHER_UID, store.address)
            assert done.stdout == "b''\n", done.stderr
        client(store).set("key", "value")
    refusals = [line for line in logs if "refused a connection" in line["event"]]
    assert [line["log_level"] for line in refusals] == ["warning"]
    assert f"port {store.address.port}" in refusals[0]["event"]
    assert f"user id {OTHER_UID}" in refusals[0]["event"]


def test_where_the_store_itself_listens_nothing_but_the_relay_can_connect(store: BootstrapStore) -> None:
    public, hidden = listening_at(store.address.port)
    assert public == "127.0.0.1"
    dialled = client(store)
    dialled.set("key", "value")
    with socket.socket() as sock:
        sock.settimeout(0.3)
        with pytest.raises(TimeoutError):
            sock.connect((hidden, store.address.port))
    # Not from a port that was admitted either, once its connection is there.
    with socket.socket() as sock, open("/proc/net/tcp") as table:
        ends = [line.split()[1:3] for line in table.readlines()[1:]]
        at = f"{int.from_bytes(socket.inet_aton(hidden), sys.byteorder):08X}:{store.address.port:04X}"
        admitted = [int(own.partition(":")[2], 16) for own, peer in ends if peer == at]
        assert admitted
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            sock.bind(("127.0.0.1", admitted[0]))
        sock.bind(("127.0.0.2", admitted[0]))
        sock.settimeout(0.3)
        with pytest.raises(TimeoutError):
            sock.connect((hidden, store.address.port))
    assert dialled.get("key") == b"value"


@as_root
def test_data_sent_before_the_refusal_do_not_reach_the_store() -> None:
    """A socket that was closed at once has no user any more: for it, the kernel says root."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        left.sendall(b"written and left")
        left.close()
        accepted, _ = listener.accept()
        with accepted:
            assert peer_uid(accepted) is None
        with socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            with accepted:
                assert peer_uid(accepted) == os.geteuid()


def test_connections_keep_working_when_their_port_is_no_longer_admitted() -> None:
    listener, kept, other = (socket.socket() for _ in range(3))
    with listener, kept, other:
        listener.bind(("127.0.0.1", 0))
        admit_only(listener, "127.0.0.1", ())
        listener.listen()
        for sock in (kept, other):
            sock.bind(("127.0.0.1", 0))
            sock.settimeout(10)
        admit_only(listener, "127.0.0.1", [kept.getsockname()[1]])
        kept.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            admit_only(listener, "127.0.0.1", [other.getsockname()[1]])
            other.connect(listener.getsockname())
            kept.sendall(b"still here")
            assert accepted.recv(100) == b"still here"


def test_values_of_any_size_arrive(store: BootstrapStore) -> None:
    value = os.urandom(6 << 20)
    one, other = client(store), client(store)
    one.set("large", value)
    assert other.get("large") == value


def test_many_workers_use_it_at_once(store: BootstrapStore) -> None:
    together = threading.Barrier(64)

    def take_part(number: int) -> int:
        own = client(store)
        together.wait(60)
        own.set(f"rank {number}", bytes(number))
        own.add("count", 1)
        return sum(len(own.get(f"rank {each}")) for each in range(64))

    with ThreadPoolExecutor(64) as pool:
        assert {*pool.map(take_part, range(64))} == {sum(range(64))}
    assert client(store).add("count", 0) == 64


def test_a_closed_store_leaves_nothing() -> None:
    def held() -> set[object]:
        files = set()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the folder itself, and what others close meanwhile
                files.add(os.readlink(f"/proc/self/fd/{fd}"))
        return {*threading.enumerate(), *(one for one in files if not one.startswith("/proc/"))}

    picker = PortPicker(None, 0.0)
    BootstrapStore.open("127.0.0.1", picker).close()  # what torch keeps from the first one
    before = held()
    for _ in range(10):
        store = BootstrapStore.open("127.0.0.1", picker)
        dialled = client(store)
        dialled.set("key", "value")
        with socket.create_connection((store.address.host, store.address.port)):
            store.close()
        del dialled
        assert listening_at(store.address.port) == []
    assert held() - before == set()


def test_it_continues_after_this_process_had_no_descriptor_left(store: BootstrapStore) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    waiting = socket.socket()
    opened = []
    reported = threading.Event()

    def note(_: object, level: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        if level == "warning" and "cannot accept more connections" in event["event"]:
            assert "ulimit -n" in event["event"]
            reported.set()
        return event

    configured = structlog.get_config()["processors"]
    structlog.configure(processors=[note, *configured])
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(highest, waiting.fileno()) + 2, hard))
        while True:
            try:
                opened.append(os.dup(0))
            except OSError:
                break
        waiting.connect((store.address.host, store.address.port))
        assert reported.wait(10)
    finally:
        structlog.configure(processors=configured)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in opened:
            os.close(fd)
        waiting.close()
    dial_bootstrap(store.address, 10.0)


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_other_names_of_the_loopback_interface_are_protected_too(host: str) -> None:
    if not is_local(resolve(host)):
        pytest.skip(f"this machine has no {host}")
    store = BootstrapStore.open(host, PortPicker(None, 0.0))
    try:
        client(store).set("key", "value")
        dial_bootstrap(store.address, 5.0)
        assert [at for at in listening_at(store.address.port) if at != "127.0.0.1"], "the store itself"
    finally:
        store.close()


def test_without_a_kernel_that_tells_the_user_workers_still_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """inet_diag is a module of the kernel that may be missing: then all sockets are unknown."""
    monkeypatch.setattr(peers, "_owner", lambda *_: None)
    with structlog.testing.capture_logs() as logs:
        store = BootstrapStore.open("127.0.0.1", PortPicker(None, 0.0))
    try:
        client(store).set("key", "value")
    finally:
        store.close()
    assert [line["event"] for line in logs if "other users of this machine can connect" in line["event"]]
    assert listening_at(store.address.port) == []
