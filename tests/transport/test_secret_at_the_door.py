"""A store with a secret: who has it connects, in TLS; everybody else is told which side has which secret."""

from __future__ import annotations

import itertools
import select
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta

import pytest
import trustme
from structlog.testing import capture_logs
from torch.distributed import TCPStore

from elastic_agent.transport import (
    NotAStoreError,
    Secret,
    TransportError,
    UnreachableError,
    WrongKeyError,
    c10d,
)
from elastic_agent.transport.addresses import listen
from elastic_agent.transport.c10d import relay as store_relay
from elastic_agent.values import Endpoint
from tests.loop_thread import Blocking, in_loop
from tests.relay import Relay
from tests.waiting import wait_for

from .support import PATIENCE_S, lease, member, program

OURS, THEIRS = Secret((b"our secret, which is long",)), Secret((b"their secret, also long",))
BOTH, BOTH_TURNED = (
    Secret((*OURS.values, *THEIRS.values)),
    Secret((*THEIRS.values, *OURS.values)),
)


@contextmanager
def served(secret: Secret | None) -> Iterator[Endpoint]:
    """Serve the store of a run, as other machines reach it."""
    host = Blocking(in_loop(c10d.C10dHost.make(listen("127.0.0.1", 0), secret)))
    try:
        yield Endpoint("127.0.0.1", host.port)
    finally:
        host.close()


def dial(endpoint: Endpoint, secret: Secret | None) -> Blocking:
    return Blocking(in_loop(c10d.dial(endpoint, "run", PATIENCE_S, secret)))


def table(endpoint: Endpoint) -> Blocking:
    return Blocking(in_loop(c10d.open_table(endpoint, PATIENCE_S, OURS)))


def test_a_rotation_in_three_steps_keeps_agents_together() -> None:
    for before, after in itertools.pairwise((OURS, BOTH, BOTH_TURNED, THEIRS)):
        for hosting in (before, after):
            with served(hosting) as endpoint:
                assert dial(endpoint, before).register(member("a"), lease("a")) is not None
                assert dial(endpoint, after).read_lease("a") == lease("a")


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (OURS, None, f"accepts only agents with its secret (key id {OURS.ids[0]}), and this agent has none"),
        (OURS, THEIRS, f"another secret (key id {OURS.ids[0]}) than this agent (key id {THEIRS.ids[0]})"),
        (None, OURS, f"was started without a secret, and this agent has one (key id {OURS.ids[0]})"),
        # The agent would accept the store, but presents the secret that the store does not know any more.
        (THEIRS, BOTH, f"another secret (key id {THEIRS.ids[0]}) than this agent (key id {OURS.ids[0]})"),
    ],
)
def test_a_wrong_missing_or_unexpected_secret_is_named(
    theirs: Secret | None, ours: Secret | None, said: str
) -> None:
    # A store without a secret does not answer a client in TLS.
    timeout_s = 1.0 if theirs is None else PATIENCE_S
    with served(theirs) as endpoint:
        for connect in (
            lambda: in_loop(c10d.dial(endpoint, "run", timeout_s, ours)),
            lambda: in_loop(c10d.agree_run_id(endpoint, "job", "run", timeout_s, ours)),
            lambda: in_loop(c10d.dial_reports(endpoint, "run", timeout_s, ours)),
            lambda: in_loop(c10d.open_table(endpoint, timeout_s, ours, "folder/")),
        ):
            with pytest.raises(WrongKeyError) as caught:
                connect()
            assert said in str(caught.value)
            assert "--secret-file" in str(caught.value)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("ours", "why"), [(None, "no secret"), (THEIRS, "another secret")])
def test_the_host_says_once_from_where_an_agent_was_refused(ours: Secret | None, why: str) -> None:
    with capture_logs() as logs, served(OURS) as endpoint:
        for _ in range(3):
            with pytest.raises(WrongKeyError):
                dial(endpoint, ours)
        wait_for("the line", lambda: [line for line in logs if "refused a connection" in line["event"]])
    refusals = [line["event"] for line in logs if line["log_level"] == "warning"]
    assert len(refusals) == 1
    assert f"from 127.0.0.1: it has {why}" in refusals[0]
    assert f"port {endpoint.port}" in refusals[0]


def test_torchs_own_client_reads_and_changes_nothing() -> None:
    with served(OURS) as endpoint:
        dial(endpoint, OURS).register(member("a"), lease("a"))
        with pytest.raises(RuntimeError):
            TCPStore(endpoint.host, endpoint.port, None, False, timedelta(seconds=1), wait_for_workers=False)
        assert dial(endpoint, OURS).read_lease("a") == lease("a")


def test_what_is_sent_is_encrypted() -> None:
    with served(OURS) as endpoint, Relay(endpoint.port, keeps=True) as relay:
        assert dial(relay.endpoint, OURS).register(member("a"), lease("a")) is not None
        assert len(relay.passed) > 1000
        for word in (b"elastic-agent/1", b"run", member("a").node_id.encode()):
            assert word not in relay.passed


def test_values_of_any_size_arrive() -> None:
    with served(OURS) as endpoint:
        client = table(endpoint)
        for size in (1, 16 * 1024, 3_000_000):
            client.put("key", b"x" * size)
            assert client.read(["key"]) == {"key": b"x" * size}


@pytest.mark.parametrize(("limit", "value", "silent"), [("HANDSHAKE_S", 0.2, 1), ("MOST_UNPROVEN", 2, 3)])
def test_clients_that_say_nothing_are_closed_in_time_and_make_room_for_others(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: float, silent: int
) -> None:
    monkeypatch.setattr(store_relay, limit, value)
    with served(OURS) as endpoint, ExitStack() as opened:
        address = endpoint.host, endpoint.port
        oldest, *_ = [opened.enter_context(socket.create_connection(address)) for _ in range(silent)]
        oldest.settimeout(PATIENCE_S)
        assert oldest.recv(1) == b""
        dial(endpoint, OURS)


def test_an_agent_that_gave_up_on_a_stopped_host_and_looks_without_the_secret_is_not_reported() -> None:
    """It has the secret; the host goes on while it looks whether the store has none."""

    def answer_late(listener: socket.socket, endpoint: Endpoint) -> None:
        sent = b""
        with listener.accept()[0] as agent:
            while data := agent.recv(65536):
                sent += data
        with (
            listener.accept()[0] as look,
            socket.create_connection((endpoint.host, endpoint.port)) as server,
        ):
            server.sendall(sent)
            server.shutdown(socket.SHUT_WR)
            with suppress(OSError):
                while server.recv(65536):
                    pass
            with suppress(OSError):
                answer_from(endpoint, look)

    with capture_logs() as logs, served(OURS) as endpoint, socket.create_server(("127.0.0.1", 0)) as listener:
        stopped = Endpoint("127.0.0.1", listener.getsockname()[1])
        thread = threading.Thread(target=answer_late, args=(listener, endpoint), daemon=True)
        thread.start()
        with pytest.raises(UnreachableError):
            in_loop(c10d.dial(stopped, "run", 1.0, OURS))
        thread.join(PATIENCE_S)
    assert [line for line in logs if line["log_level"] == "warning"] == []


@pytest.mark.parametrize("kept_bytes", [0, 1, 200])
def test_a_connection_that_breaks_in_the_handshake_is_dialled_again(kept_bytes: int) -> None:
    """Whatever broke it, it is no evidence of another secret."""

    def break_first(listener: socket.socket, endpoint: Endpoint) -> None:
        with (
            listener.accept()[0] as client,
            socket.create_connection((endpoint.host, endpoint.port)) as server,
        ):
            server.sendall(client.recv(65536))
            client.sendall(server.recv(65536)[:kept_bytes])
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        for _ in range(2):  # how the agent looks what is there
            with suppress(OSError), listener.accept()[0] as client:
                answer_from(endpoint, client)

    with served(OURS) as endpoint, socket.create_server(("127.0.0.1", 0)) as listener:
        broken = Endpoint("127.0.0.1", listener.getsockname()[1])
        thread = threading.Thread(target=break_first, args=(listener, endpoint), daemon=True)
        thread.start()
        with pytest.raises(UnreachableError):
            dial(broken, OURS)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_S)


def answer_from(endpoint: Endpoint, client: socket.socket) -> None:
    """Forward what the server answers to a client's first messages."""
    with socket.create_connection((endpoint.host, endpoint.port)) as server:
        forward_between(client, server)


def forward_between(client: socket.socket, server: socket.socket) -> None:
    """Forward until one of them hangs up."""
    ends = {client: server, server: client}
    while readable := select.select([*ends], [], [], PATIENCE_S)[0]:
        for end in readable:
            data = end.recv(65536)
            if not data:
                return
            ends[end].sendall(data)


def test_a_client_that_sends_garbage_is_closed_and_disturbs_nobody() -> None:
    with served(OURS) as endpoint:
        link = dial(endpoint, OURS)
        for garbage in (b"\x00" * 4096, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"\x01" * 70000):
            with socket.create_connection((endpoint.host, endpoint.port)) as stranger, suppress(OSError):
                stranger.settimeout(PATIENCE_S)
                stranger.sendall(garbage)
                while stranger.recv(4096):
                    pass
        assert link.register(member("a"), lease("a")) is not None


def test_a_server_with_other_certificates_is_another_program() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("localhost").configure_cert(context)
    with program(lambda sock: context.wrap_socket(sock, server_side=True).close()) as endpoint:
        with pytest.raises(NotAStoreError, match="another program") as caught:
            dial(endpoint, OURS)
        assert not isinstance(caught.value, WrongKeyError)


def test_a_machine_that_cannot_keep_others_out_hosts_no_store_with_a_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(host: str, family: int) -> None:
        raise OSError("the kernel does not tell whose a connection is")

    monkeypatch.setattr(store_relay, "check_peers_are_told", unknown)
    with pytest.raises(TransportError, match="tcp_diag"):
        in_loop(c10d.C10dHost.make(listen("127.0.0.1", 0), OURS))
