"""A bootstrap store whose relay asks the agents of other machines whose a connection is.

All connections are within this machine; the relay is made to take them for those of another one.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import structlog
from torch.distributed import TCPStore

from elastic_agent.protocol import Address
from elastic_agent.transport import (
    NotAStoreError,
    Seal,
    Secret,
    TransportError,
    UnreachableError,
    addresses,
    peers,
)
from elastic_agent.transport.addresses import listen
from elastic_agent.transport.c10d import admission, responder, store_relay
from elastic_agent.transport.c10d.bootstrap import (
    BootstrapStore,
    PortPicker,
    bootstrap_seal,
    dial_bootstrap,
    serve,
)
from elastic_agent.transport.c10d.identification import (
    HELLO,
    AgentEnd,
    Answer,
    Ends,
    IdentificationError,
    Question,
    RelayEnd,
)
from elastic_agent.transport.c10d.responder import Responder, is_same_users
from elastic_agent.transport.c10d.store_relay import StoreRelay
from elastic_agent.values import Endpoint

from .support import raw_client
from .test_store_relay import OTHER_UID, as_root, connect_as

SECRET = Secret((b"the secret of the run",))
SEAL = bootstrap_seal(SECRET, "job")
ENDS = Ends(("10.0.0.2", 40123), ("10.0.0.1", 29401))


class Guarded:
    """A store whose relay takes every connection for one from another machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.relay = StoreRelay(listen("127.0.0.1", 0), "the bootstrap store of the workers", SEAL)
        self._store: TCPStore | None = serve(self.relay.store_listener, "127.0.0.1")
        monkeypatch.setattr(store_relay, "peer_uid", lambda _: None)
        self.address = Address("127.0.0.1", self.relay.port)

    def client(self) -> Any:
        return raw_client(Endpoint(self.address.host, self.address.port))

    def close(self) -> None:
        self.relay.close()
        self._store = None


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guarded]:
    with closing(Guarded(monkeypatch)) as made:
        yield made


def refusals(logs: list[structlog.typing.EventDict]) -> list[str]:
    return [line["event"] for line in logs if line["log_level"] == "warning"]


def test_workers_of_a_machine_whose_agent_has_the_secret_connect(guarded: Guarded) -> None:
    with closing(Responder(guarded.address, SEAL, 10.0)):
        dial_bootstrap(guarded.address, 10.0)
        one, other = guarded.client(), guarded.client()
        one.set("key", "value")
        assert other.get("key") == b"value"


@as_root
def test_other_users_of_that_machine_are_refused_and_reported_once(guarded: Guarded) -> None:
    with structlog.testing.capture_logs() as logs, closing(Responder(guarded.address, SEAL, 10.0)):
        for _ in range(2):
            assert connect_as(OTHER_UID, guarded.address, b"\0").stdout == "b''\n"
        guarded.client().set("key", "value")
    (refusal,) = refusals(logs)
    assert (
        f"(port {guarded.address.port}) from 127.0.0.1: on that machine, no process of the agent's user"
        in refusal
    )


def test_a_machine_without_an_agent_is_refused_and_reported_once(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "HOLD_S", 0.2)
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            with pytest.raises(TransportError):
                dial_bootstrap(guarded.address, 5.0)
    (refusal,) = refusals(logs)
    assert "from 127.0.0.1: no agent of this run is connected from there" in refusal


@pytest.mark.parametrize(
    "seal", [bootstrap_seal(Secret((b"another",)), "job"), bootstrap_seal(SECRET, "another run")]
)
def test_an_agent_of_another_secret_or_run_lets_no_worker_in(
    guarded: Guarded, seal: Seal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "HOLD_S", 0.2)
    with pytest.raises(
        NotAStoreError, match="is not the bootstrap store of this run: what it sent does not verify"
    ):
        Responder(guarded.address, seal, 10.0)
    with pytest.raises(TransportError):
        dial_bootstrap(guarded.address, 5.0)


def test_a_channel_whose_agent_proves_nothing_is_closed(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "HOLD_S", 0.2)
    with socket.create_connection((guarded.address.host, guarded.address.port), 10) as sock:
        sock.sendall(HELLO + os.urandom(16))
        while sock.recv(1000):
            pass


def test_a_channel_whose_agent_forges_its_proof_is_closed_and_reported(guarded: Guarded) -> None:
    with (
        structlog.testing.capture_logs() as logs,
        socket.create_connection((guarded.address.host, guarded.address.port), 10) as sock,
    ):
        end = AgentEnd(SEAL)
        sock.sendall(end.hello())
        end.received(sock.recv(1000))
        sock.sendall(AgentEnd(SEAL).proof())
        assert sock.recv(1000) == b""
    (refusal,) = refusals(logs)
    assert "refused an agent at 127.0.0.1" in refusal
    assert "does not verify" in refusal


def test_workers_that_connect_while_the_channel_is_broken_are_admitted_when_it_is_there_again(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responder, "REDIALS_S", (0.5,))
    with closing(Responder(guarded.address, SEAL, 10.0)) as channel:
        channel._sock.shutdown(socket.SHUT_RDWR)  # as by a firewall that forgets the connection
        guarded.client().set("key", "value")


@pytest.mark.parametrize("everywhere", [(socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")])
def test_a_store_that_listens_on_all_addresses_is_guarded_too(
    everywhere: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a name with several addresses, and for an address that is translated on the way to this machine."""
    monkeypatch.setattr(addresses, "_to_listen_at", lambda _: [everywhere])
    with closing(BootstrapStore.open("203.0.113.5", PortPicker(None, 0.0), SEAL)) as store:
        raw_client(Endpoint("127.0.0.1", store.address.port)).set("key", "value")
        monkeypatch.setattr(store_relay, "peer_uid", lambda _: None)
        with closing(Responder(Address("127.0.0.1", store.address.port), SEAL, 10.0)):
            assert raw_client(Endpoint("127.0.0.1", store.address.port)).get("key") == b"value"
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("", store.address.port), reuse_port=True)


def bound(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    return sock


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_what_a_connection_sent_before_a_later_one_took_its_port_is_not_forwarded(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, may_answer = threading.Event(), threading.Event()

    def slowly(ends: Ends) -> bool:
        asked.set()
        return may_answer.wait(10) and is_same_users(ends)

    monkeypatch.setattr(responder, "is_same_users", slowly)
    address = (guarded.address.host, guarded.address.port)
    with closing(Responder(guarded.address, SEAL, 10.0)), bound(0) as first:
        port = first.getsockname()[1]
        first.connect(address)
        first.sendall(struct.pack("=BIB", 0, 0x3C85F7CE, 1) + struct.pack("=Q4sQ4s", 4, b"/key", 4, b"evil"))
        assert asked.wait(10)
        reset(first)
        with bound(port) as second:
            second.connect(address)
            may_answer.set()
            assert not guarded.client().check(["key"])


def test_the_owner_of_a_connection_that_was_reset_meanwhile_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()

        def of_a_later_one(*_: object) -> int:
            reset(first)
            return os.geteuid()

        monkeypatch.setattr(peers, "_owner", of_a_later_one)
        with accepted, pytest.raises(OSError, match="not connected"):
            peers.peer_uid(accepted)


def test_a_store_that_is_gone_is_an_error_and_leaves_no_thread(guarded: Guarded) -> None:
    channel = Responder(guarded.address, SEAL, 10.0)
    guarded.close()
    with pytest.raises(UnreachableError, match="refused"):
        Responder(guarded.address, SEAL, 10.0)
    channel.close()
    channel._thread.join(10)
    assert not channel._thread.is_alive()


def test_something_that_does_not_answer_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address("127.0.0.1", silent.getsockname()[1])
        with pytest.raises(UnreachableError, match="did not answer within"):
            Responder(address, SEAL, 0.2)


def test_a_kernel_that_does_not_tell_users_is_an_error_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lacks(*_: object) -> None:
        raise OSError(2, "No such file or directory")

    monkeypatch.setattr(responder, "check_peers_are_told", lacks)
    with pytest.raises(TransportError, match="modprobe tcp_diag"):
        Responder(Address("127.0.0.1", 1), SEAL, 0.2)


def test_only_own_connections_are_claimed() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as own,
    ):
        ends = Ends(own.getsockname(), own.getpeername())
        assert is_same_users(ends)
        assert not is_same_users(Ends(("127.0.0.1", 1), own.getpeername()))
        assert not is_same_users(Ends(("::1", own.getsockname()[1]), own.getpeername()))


# -- messages -----------------------------------------------------------------------------------


def opened() -> tuple[AgentEnd, RelayEnd]:
    agent, relay = AgentEnd(SEAL), RelayEnd(SEAL)
    reply, _ = relay.received(agent.hello())
    agent.received(reply)
    relay.received(agent.proof())
    assert agent.is_open
    assert relay.is_open
    return agent, relay


@pytest.mark.parametrize("ends", [ENDS, Ends(("fd00::2", 40123), ("fd00::1", 29401))])
def test_a_question_is_answered_however_the_bytes_are_cut(ends: Ends) -> None:
    agent, relay = opened()
    questions = [Question(number, ends) for number in (1, 2)]
    received = [
        question
        for byte in b"".join(map(relay.question, questions))
        for question in agent.received(bytes([byte]))
    ]
    assert received == questions
    _, answers = relay.received(agent.answer(Answer(1, True)) + agent.answer(Answer(2, False)))
    assert answers == [Answer(1, True), Answer(2, False)]


def test_messages_can_be_neither_repeated_nor_reordered_nor_reflected_nor_moved_to_another_channel() -> None:
    agent, relay = opened()
    first, second = relay.question(Question(1, ENDS)), relay.question(Question(2, ENDS))
    with pytest.raises(IdentificationError, match="out of order"):
        agent.received(second)
    agent, relay = opened()
    answer = agent.answer(Answer(1, True))
    relay.received(answer)
    with pytest.raises(IdentificationError, match="out of order"):
        relay.received(answer)
    agent, relay = opened()
    with pytest.raises(IdentificationError, match="does not verify"):
        relay.received(relay.question(Question(1, ENDS)))
    with pytest.raises(IdentificationError, match="does not verify"):
        relay.received(first)
    _, other = opened()
    with pytest.raises(IdentificationError, match="does not verify"):
        other.received(agent.answer(Answer(1, True)))


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", HELLO + bytes(16) + b"\xff\xff", b"E" * 20]
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(IdentificationError):
        RelayEnd(SEAL).received(data)
