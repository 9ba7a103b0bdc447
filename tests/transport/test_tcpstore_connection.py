"""The blocking client of torch's store: it and torch's own client see the same store, and no answer is mixed up."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from elastic_agent.testing.node import freeze
from elastic_agent.transport import StoreLostError
from elastic_agent.transport.c10d.tcpstore import MOST_READ_BYTES, TCPStoreConnection
from elastic_agent.transport.c10d.wire import probe_store
from elastic_agent.transport.tcpstore_wire import MAX_KEY_BYTES, MAX_VALUE_BYTES, packed_size

from .support import PATIENCE_S

HOST = """
import sys
from elastic_agent.store_servers import serve_store
import socket
sock = socket.create_server(("127.0.0.1", 0))
port = sock.getsockname()[1]
store = serve_store(sock, "127.0.0.1")
print(port, flush=True)
sys.stdin.read()
"""


def connected(port: int, timeout_s: float = PATIENCE_S) -> TCPStoreConnection:
    sock = socket.create_connection(("127.0.0.1", port))
    probe_store(sock, PATIENCE_S, "the store")
    return TCPStoreConnection(sock, "the store", timeout_s)


@pytest.fixture
def torchs() -> TCPStore:
    """Return torch's client of a server in this process."""
    patience = timedelta(seconds=PATIENCE_S)
    return TCPStore("127.0.0.1", 0, None, True, patience, wait_for_workers=False)


@pytest.fixture
def ours(torchs: TCPStore) -> Iterator[TCPStoreConnection]:
    with closing(connected(torchs.port)) as connection:
        yield connection


def test_torchs_client_sees_the_same_values(torchs: TCPStore, ours: TCPStoreConnection) -> None:
    torchs.set("theirs", b"\0\xff")
    torchs.set("empty", b"")
    assert torchs.check(["theirs", "empty"])  # they have arrived
    assert ours.get(["theirs", "empty", "missing"]) == [b"\0\xff", b"", b""]
    ours.set("ours", b"a")
    ours.ping()
    assert torchs.get("ours") == b"a"
    assert {"theirs", "empty", "ours"} <= {*ours.list_keys()}
    assert torchs.delete_key("ours")
    assert (ours.delete_key("theirs"), ours.delete_key("theirs")) == (True, False)
    assert not torchs.check(["theirs"])


def test_torchs_client_takes_from_the_same_queues(torchs: TCPStore, ours: TCPStoreConnection) -> None:
    ours.queue_push("queue", b"first")
    ours.ping()
    torchs.queue_push("queue", b"second")
    torchs.queue_push("queue", b"third")
    assert torchs.queue_pop("queue") == b"first"
    assert ours.wait("queue", PATIENCE_S)
    assert [ours.queue_pop("queue") for _ in range(3)] == [b"second", b"third", None]


def test_values_are_compared_and_set_at_once(torchs: TCPStore, ours: TCPStoreConnection) -> None:
    assert ours.compare_set("key", b"", b"first") == b"first"
    assert torchs.compare_set("key", "first", "second") == b"second"
    assert ours.compare_set("key", b"first", b"third") == b"second"
    assert ours.compare_set("missing", b"expected", b"value") == b"expected"


def test_a_wait_ends_when_torchs_client_sets_the_key(torchs: TCPStore, ours: TCPStoreConnection) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ours.wait, "key", PATIENCE_S)
        torchs.set("unrelated", b"")
        torchs.set("key", b"value")
        assert waiting.result()
    assert ours.get(["key"]) == [b"value"]


def test_answers_stay_in_order_when_waits_end_by_time_out_and_key_at_once(torchs: TCPStore) -> None:
    """The key may be set before the wait, while it is on, when it is just being cancelled, and after."""
    chance = random.Random(44)
    with closing(connected(torchs.port)) as ours, closing(connected(torchs.port)) as other:
        found: list[bool] = []
        for number in range(300):
            setter = threading.Thread(target=other.set, args=(f"key {number}", b"%d" % number))
            setter.start()
            found.append(ours.wait(f"key {number}", chance.random() * 0.001))
            setter.join()
            other.ping()
            assert ours.get([f"key {number}"]) == [b"%d" % number]
    assert True in found


def test_the_largest_values_arrive_and_larger_ones_are_not_sent(
    torchs: TCPStore, ours: TCPStoreConnection
) -> None:
    largest = b"v" * MAX_VALUE_BYTES
    ours.set("k" * MAX_KEY_BYTES, largest)
    ours.ping()
    torchs.append("k" * MAX_KEY_BYTES, largest)
    assert torchs.check(["k" * MAX_KEY_BYTES])  # it has arrived
    for call, *arguments in (
        (ours.set, "key", largest + b"v"),
        (ours.compare_set, "key", b"", largest + b"v"),
        (ours.get, ["k" * (MAX_KEY_BYTES + 1)]),
    ):
        with pytest.raises(ValueError, match="a store takes at most"):
            call(*arguments)  # type: ignore[operator]
    assert ours.get(["k" * MAX_KEY_BYTES, "key"]) == [2 * largest, b""]


def test_closing_ends_the_wait_of_another_thread(torchs: TCPStore) -> None:
    ours = connected(torchs.port)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ours.wait, "never", PATIENCE_S)
        while not torchs.check(["unrelated"]):
            torchs.set("unrelated", b"")
        ours.close()
        with pytest.raises(StoreLostError, match="the connection was closed"):
            waiting.result()
    with pytest.raises(StoreLostError, match="the connection was closed"):
        ours.ping()


@pytest.fixture
def host() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a server in a process of its own."""
    with subprocess.Popen(
        [sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


def test_a_server_that_is_frozen_is_lost(host: tuple[subprocess.Popen[str], int]) -> None:
    process, port = host
    with closing(connected(port, timeout_s=0.5)) as ours:
        freeze(process.pid)
        with pytest.raises(StoreLostError, match="the store did not answer within"):
            ours.wait("key", 0.01)
        with pytest.raises(StoreLostError, match="the store did not answer within"):
            ours.set("key", b"value")


def test_a_server_that_ends_is_lost(host: tuple[subprocess.Popen[str], int]) -> None:
    process, port = host
    with closing(connected(port)) as ours:
        process.kill()
        process.wait()
        with pytest.raises(StoreLostError, match="the store closed the connection"):
            ours.wait("key", PATIENCE_S)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n", packed_size(MOST_READ_BYTES + 1)])
def test_a_server_that_answers_otherwise_is_lost(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sock = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    with there, closing(TCPStoreConnection(sock, "the store", PATIENCE_S)) as ours:
        there.sendall(answer)
        for _ in range(2):
            with pytest.raises(StoreLostError, match="is used by another program, which is not a store"):
                ours.get(["key"])
