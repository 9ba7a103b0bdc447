"""A listening socket that only its owner can connect to."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from elastic_agent.transport.c10d.relay import HiddenListener
from tests.other_users import OTHER_UID, needs_other_users, run_as

TRIES_TO_CONNECT = """
address, owners_port = (sys.argv[1], int(sys.argv[2])), int(sys.argv[3])
IP_LOCAL_PORT_RANGE = 51  # Linux 6.3
kept = []
for options in (), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
    for source in None, "range", "127.0.0.1", "127.0.0.9", "0.0.0.0", sys.argv[1]:
        sock = socket.socket()
        sock.settimeout(0.05)
        try:
            for option in options:
                sock.setsockopt(socket.SOL_SOCKET, option, 1)
            if source == "range":
                sock.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("=HH", owners_port, owners_port))
            elif source:
                sock.bind((source, owners_port))
                print("has the port")
            sock.connect(address)
            kept.append(sock)
        except OSError:
            pass
print("tried")
"""


@pytest.fixture
def hidden() -> Iterator[HiddenListener]:
    with socket.create_server(("127.0.0.1", 0)) as public:
        listener = HiddenListener(public)
        yield listener
        listener.close()


@needs_other_users
def test_another_user_does_not_reach_it(hidden: HiddenListener) -> None:
    own = hidden.connect()
    host, port = own.getpeername()
    assert run_as(OTHER_UID, TRIES_TO_CONNECT, host, str(port), str(own.getsockname()[1])) == "tried\n"
    hidden.store_listener.setblocking(False)
    accepted, peer = hidden.store_listener.accept()
    assert peer == own.getsockname()
    with own, accepted, pytest.raises(BlockingIOError):
        hidden.store_listener.accept()


def test_its_owner_reaches_it_through_its_method_only(hidden: HiddenListener) -> None:
    hidden.store_listener.setblocking(False)
    with hidden.connect() as first, socket.create_connection(first.getpeername()), hidden.connect() as second:
        for own in first, second:
            accepted, peer = hidden.store_listener.accept()
            with accepted:
                assert peer == own.getsockname()
        with pytest.raises(BlockingIOError):
            hidden.store_listener.accept()


def test_without_a_store_nobody_waits_long_for_a_connection(hidden: HiddenListener) -> None:
    """The decoy gets the connections then, and takes few."""
    hidden.store_listener.close()
    with contextlib.ExitStack() as opened:

        def connect_often() -> None:
            for _ in range(16):
                opened.enter_context(hidden.connect())

        with pytest.raises(TimeoutError):
            connect_often()
