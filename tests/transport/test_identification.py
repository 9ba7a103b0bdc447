"""A bootstrap store whose relay asks the agents of other machines whose a connection is.

All connections are within this machine; the relay is made to take them for those of another one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from torch.distributed import TCPStore

from elastic_agent.protocol import Address
from elastic_agent.store_servers import serve_store
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
from tests.other_users import OTHER_UID, is_refused, needs_other_users
from tests.waiting import wait_for

from .support import PATIENCE_S, raw_client

SECRET = Secret((b"the secret of the run",))
SEAL = bootstrap_seal(SECRET, "job")
ENDS = Ends(("10.0.0.2", 40123), ("10.0.0.1", 29401))


class Guarded:
    """A store whose relay takes every connection for one from another machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.relay = StoreRelay(listen("127.0.0.1", 0), "the bootstrap store of the workers", SEAL)
        self._store: TCPStore | None = serve_store(self.relay.store_listener, "127.0.0.1")
        monkeypatch.setattr(store_relay, "peer_uid", lambda _: None)
        monkeypatch.setattr(admission, "HOLD_S", PATIENCE_S)
        self.address = Address("127.0.0.1", self.relay.port)

    def client(self) -> Any:
        return raw_client(Endpoint(self.address.host, self.address.port))

    def close(self) -> None:
        self._store = None
        self.relay.close()


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guarded]:
    with closing(Guarded(monkeypatch)) as made:
        yield made


def refusals(logs: list[structlog.typing.EventDict]) -> list[str]:
    return [line["event"] for line in logs if line["event"].startswith("refused ")]


def test_workers_of_a_machine_whose_agent_has_the_secret_connect(guarded: Guarded) -> None:
    with closing(Responder(guarded.address, SEAL, PATIENCE_S)):
        dial_bootstrap(guarded.address, PATIENCE_S)
        one, other = guarded.client(), guarded.client()
        one.set("key", "value")
        assert other.get("key") == b"value"


@needs_other_users
def test_other_users_of_that_machine_are_refused_and_reported_once(guarded: Guarded) -> None:
    with structlog.testing.capture_logs() as logs, closing(Responder(guarded.address, SEAL, PATIENCE_S)):
        for _ in range(2):
            assert is_refused(OTHER_UID, guarded.address.host, guarded.address.port, b"\0")
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

        def is_reported() -> bool:
            with pytest.raises(TransportError):
                dial_bootstrap(guarded.address, PATIENCE_S)
            return bool(refusals(logs))

        wait_for("a message", is_reported)  # none if the relay is too late to see what the client sent
        assert is_reported()
    (refusal,) = refusals(logs)
    assert "from 127.0.0.1: no agent of this run is connected from there" in refusal


@pytest.mark.parametrize(
    "seal", [bootstrap_seal(Secret((b"another",)), "job"), bootstrap_seal(SECRET, "another run")]
)
def test_an_agent_of_another_secret_or_run_lets_no_worker_in(
    guarded: Guarded, seal: Seal, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        NotAStoreError, match="is not the bootstrap store of this run: what it sent does not verify"
    ):
        Responder(guarded.address, seal, PATIENCE_S)
    monkeypatch.setattr(admission, "HOLD_S", 0.2)
    with pytest.raises(TransportError):
        dial_bootstrap(guarded.address, PATIENCE_S)


def test_a_channel_whose_agent_proves_nothing_is_closed(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "HOLD_S", 0.2)
    with socket.create_connection((guarded.address.host, guarded.address.port), PATIENCE_S) as sock:
        sock.sendall(HELLO + os.urandom(16))
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(1000):
                pass


def test_a_channel_whose_agent_forges_its_proof_is_closed_and_reported(guarded: Guarded) -> None:
    with (
        structlog.testing.capture_logs() as logs,
        socket.create_connection((guarded.address.host, guarded.address.port), PATIENCE_S) as sock,
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
    with closing(Responder(guarded.address, SEAL, PATIENCE_S)) as channel:
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
        with closing(Responder(Address("127.0.0.1", store.address.port), SEAL, PATIENCE_S)):
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
        return may_answer.wait(PATIENCE_S) and is_same_users(ends)

    monkeypatch.setattr(responder, "is_same_users", slowly)
    address = (guarded.address.host, guarded.address.port)
    with closing(Responder(guarded.address, SEAL, PATIENCE_S)), bound(0) as first:
        port = first.getsockname()[1]
        first.connect(address)
        first.sendall(struct.pack("=BIB", 0, 0x3C85F7CE, 1) + struct.pack("=Q4sQ4s", 4, b"/key", 4, b"evil"))
        assert asked.wait(PATIENCE_S)
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
    channel = Responder(guarded.address, SEAL, PATIENCE_S)
    guarded.close()
    with pytest.raises(UnreachableError, match="refused"):
        Responder(guarded.address, SEAL, PATIENCE_S)
    channel.close()
    channel._thread.join(PATIENCE_S)
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


# -- crowds --------------------------------------------------------------------------------------


def connection_from(host: str, guarded: Guarded) -> socket.socket:
    return socket.create_connection(
        (guarded.address.host, guarded.address.port), PATIENCE_S, source_address=(host, 0)
    )


def channel_from(host: str, guarded: Guarded) -> tuple[socket.socket, AgentEnd]:
    """An open one, whose agent answers nothing."""
    sock, end = connection_from(host, guarded), AgentEnd(SEAL)
    sock.sendall(end.hello())
    while not end.is_open:
        end.received(sock.recv(1000))
    sock.sendall(end.proof())
    wait_for_channel(host, guarded)
    return sock, end


def wait_for_channel(host: str, guarded: Guarded) -> None:
    remote = guarded.relay._remote
    assert remote is not None
    wait_for("the channel", lambda: remote._channels.get(host))


def is_open(sock: socket.socket) -> bool:
    """Return whether the relay has not closed this connection; it sends nothing on an undecided one."""
    sock.setblocking(False)
    try:
        return sock.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def wait_for_closed(sockets: list[socket.socket], count: int) -> None:
    """Wait until the relay has closed as many; they are the first of these."""
    wait_for("closed connections", lambda: sum(map(is_open, sockets)) <= len(sockets) - count)
    assert [is_open(sock) for sock in sockets] == [False] * count + [True] * (len(sockets) - count)


def test_silent_connections_from_a_member_are_limited_and_disturb_no_other_machine(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MOST_STRANGERS", 4)
    monkeypatch.setattr(admission, "MOST_OF_A_MEMBER", 8)
    with closing(Responder(guarded.address, SEAL, PATIENCE_S)), contextlib.ExitStack() as opened:
        wait_for_channel("127.0.0.1", guarded)
        silent = [opened.enter_context(connection_from("127.0.0.1", guarded)) for _ in range(20)]
        newcomers = [opened.enter_context(connection_from(f"127.0.0.{n}", guarded)) for n in (2, 3, 4)]
        wait_for_closed(silent, 12)
        assert all(map(is_open, newcomers))
        guarded.client().set("key", "value")


def test_of_too_many_strangers_the_oldest_makes_room_whether_it_has_begun_a_channel_or_not(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MOST_STRANGERS", 4)
    with contextlib.ExitStack() as opened:
        beginning = [opened.enter_context(connection_from("127.0.0.2", guarded)) for _ in range(4)]
        for sock in beginning:
            sock.sendall(HELLO)
        remote = guarded.relay._remote
        assert remote is not None
        wait_for("four channels", lambda: len(remote._unproven) == 4)
        silent = [opened.enter_context(connection_from("127.0.0.3", guarded)) for _ in range(2)]
        wait_for_closed(beginning, 2)
        assert all(map(is_open, silent))


def test_few_descriptors_leave_some_for_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert admission._affordable(admission.MOST_STRANGERS) == 256


def test_an_agent_that_comes_late_is_asked_although_another_one_has_not_answered(guarded: Guarded) -> None:
    frozen, _ = channel_from("127.0.0.2", guarded)
    worker = connection_from("127.0.0.3", guarded)
    worker.sendall(b"\0")
    assert frozen.recv(1000)  # the question
    late, end = channel_from("127.0.0.3", guarded)
    with frozen, worker, late:
        (question,) = end.received(late.recv(1000))
        assert question.ends.client == worker.getsockname()


def test_questions_about_connections_that_are_over_are_forgotten(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MOST_OF_A_MEMBER", 4)
    frozen, _ = channel_from("127.0.0.2", guarded)
    remote = guarded.relay._remote
    assert remote is not None
    with frozen, contextlib.ExitStack() as opened:
        connections = [opened.enter_context(connection_from("127.0.0.2", guarded)) for _ in range(20)]
        wait_for_closed(connections, 16)
        for connection in connections[16:]:
            connection.sendall(b"\0")
        (channel,) = remote._channels["127.0.0.2"]
        wait_for("questions about all that are open", lambda: len(channel.asked) == 4)
        for _ in range(4):
            opened.enter_context(connection_from("127.0.0.2", guarded))
        wait_for("the end of all questions", lambda: not channel.asked)


def test_strangers_cause_a_limited_number_of_questions(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "HOLD_S", 10.0)
    monkeypatch.setattr(admission, "QUESTIONS_TO_ALL_PER_S", 1.0)
    monkeypatch.setattr(admission, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    agent, _ = channel_from("127.0.0.2", guarded)
    remote = guarded.relay._remote
    assert remote is not None
    (channel,) = remote._channels["127.0.0.2"]
    with agent, contextlib.ExitStack() as opened:
        for _ in range(50):
            opened.enter_context(connection_from("127.0.0.3", guarded)).sendall(b"\0")
        wait_for("all strangers", lambda: sum(one.is_worker for one in [*remote._undecided]) == 50)
        assert len(channel.asked) == 11, "one at once, then one for each second that a connection is held"


def test_a_connection_that_cannot_be_watched_does_not_end_the_relay(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Responder(guarded.address, SEAL, PATIENCE_S)):
        wait_for_channel("127.0.0.1", guarded)
        monkeypatch.setattr(admission, "HOLD_S", 0.2)
        register = guarded.relay._selector.register

        def is_full(*_: object) -> None:
            monkeypatch.setattr(guarded.relay._selector, "register", register)
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(guarded.relay._selector, "register", is_full)
        with (
            connection_from("127.0.0.1", guarded) as unwatched,
            connection_from("127.0.0.1", guarded) as later,
        ):
            wait_for_closed([unwatched, later], 2)  # the second one because its time is over
        monkeypatch.setattr(admission, "HOLD_S", PATIENCE_S)
        guarded.client().set("key", "value")


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
