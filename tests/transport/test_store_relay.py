"""A bootstrap store on a loopback address, which other users of the machine do not reach."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import structlog
from torch.distributed import TCPStore

from elastic_agent.transport import TransportError, is_local, peers, resolve
from elastic_agent.transport.c10d import BootstrapStore, PortPicker, check_store
from elastic_agent.transport.peers import peer_uid
from elastic_agent.values import Endpoint
from tests.loop_thread import in_loop
from tests.other_users import OTHER_UID, SPEAKS_TO_THE_STORE, is_refused, needs_other_users
from tests.waiting import wait_for

from .support import PATIENCE_S, in_another_process, raw_client


def client(store: BootstrapStore) -> TCPStore:
    return raw_client(Endpoint(store.address.host, store.address.port))


def listening_at(port: int) -> list[str]:
    """Return the addresses at which this machine listens on a port, as every user can see them."""
    found = []
    with open("/proc/net/tcp") as table:
        for line in table.readlines()[1:]:
            host, _, at = line.split()[1].partition(":")
            if int(at, 16) == port and line.split()[3] == "0A":
                found.append(socket.inet_ntoa(int(host, 16).to_bytes(4, sys.byteorder)))
    return sorted(found)


@needs_other_users
def test_another_user_is_refused_and_reported_once(store: BootstrapStore) -> None:
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            assert is_refused(OTHER_UID, store.address.host, store.address.port)
        client(store).set("key", "value")
    refusals = [line for line in logs if "refused a connection" in line["event"]]
    assert [line["log_level"] for line in refusals] == ["warning"]
    assert f"port {store.address.port}" in refusals[0]["event"]
    assert f"user id {OTHER_UID}" in refusals[0]["event"]


@needs_other_users
def test_on_other_addresses_everybody_who_can_connect_is_served() -> None:
    store = BootstrapStore.open("0.0.0.0", PortPicker(None, 0.0))
    try:
        assert not is_refused(OTHER_UID, "127.0.0.1", store.address.port, SPEAKS_TO_THE_STORE)
    finally:
        store.close()


def test_the_store_itself_answers_nothing_but_the_relay(store: BootstrapStore) -> None:
    dialled = client(store)
    hidden = {*listening_at(store.address.port)} - {"127.0.0.1"}
    assert len(hidden) == 1
    with pytest.raises(TransportError, match="did not answer"):
        in_loop(check_store(Endpoint(*hidden, store.address.port), 0.3))
    dialled.set("key", "value")


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


def test_values_of_any_size_arrive(store: BootstrapStore) -> None:
    value = os.urandom(6 << 20)
    writer, reader = client(store), client(store)
    writer.set("large", value)
    assert reader.get("large") == value


def _is_hidden(address: tuple[str, int], port: int) -> bool:
    return address[1] == port and address[0] != "127.0.0.1"


def test_what_is_passed_on_is_sent_at_once(store: BootstrapStore) -> None:
    """Otherwise a small answer waits up to 40 ms for the other end to acknowledge the one before."""
    dialled = client(store)
    dialled.set("key", "value")
    port = store.address.port
    of_relay = [
        connection.fd
        for connection in psutil.Process().net_connections("tcp4")
        if connection.raddr
        and (connection.laddr == ("127.0.0.1", port) or _is_hidden(connection.raddr, port))
    ]
    assert len(of_relay) >= 2
    for descriptor in of_relay:
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert dialled.get("key") == b"value"


def test_many_workers_use_it_at_once(store: BootstrapStore) -> None:
    together = threading.Barrier(64)

    def take_part(number: int) -> int:
        own = client(store)
        together.wait(PATIENCE_S)
        own.set(f"rank {number}", bytes(number))
        own.add("count", 1)
        return sum(len(own.get(f"rank {each}")) for each in range(64))

    with ThreadPoolExecutor(64) as pool:
        assert {*pool.map(take_part, range(64))} == {sum(range(64))}
    assert client(store).add("count", 0) == 64


def held() -> set[object]:
    """Return the threads and open files of this process."""
    files = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder itself, and what others close meanwhile
            files.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {*threading.enumerate(), *(file for file in files if not file.startswith("/proc/"))}


def test_a_closed_store_leaves_nothing() -> None:
    in_another_process(open_and_close_stores)


def open_and_close_stores() -> None:
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
    wait_for("the end of all that was opened", lambda: held() <= before)


def test_it_continues_after_this_process_had_no_descriptor_left() -> None:
    in_another_process(exhaust_descriptors)


def exhaust_descriptors() -> None:
    store = BootstrapStore.open("127.0.0.1", PortPicker(None, 0.0))
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
        assert reported.wait(PATIENCE_S)
    finally:
        structlog.configure(processors=configured)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in opened:
            os.close(fd)
        waiting.close()
    in_loop(check_store(Endpoint(store.address.host, store.address.port), PATIENCE_S))
    store.close()


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_other_names_of_the_loopback_interface_are_protected_too(host: str) -> None:
    if not is_local(resolve(host)):
        pytest.skip(f"this machine has no {host}")
    store = BootstrapStore.open(host, PortPicker(None, 0.0))
    try:
        client(store).set("key", "value")
        in_loop(check_store(Endpoint(store.address.host, store.address.port), PATIENCE_S))
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
