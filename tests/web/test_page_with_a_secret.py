"""The status page of a run with a secret: who has not the secret reads nothing."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

from elastic_agent.monitoring.status import RunStatus
from elastic_agent.transport import Secret, peers
from elastic_agent.values import Endpoint
from elastic_agent.web.server import ShownRun, open_status_page
from tests.other_users import OTHER_UID, is_refused, needs_other_users, run_as
from tests.waiting import GUARD_S
from tests.web.test_status_page import serving

OURS, THEIRS = Secret((b"our secret, which is long",)), Secret((b"their secret, also long",))
REQUEST = b"GET /api/status HTTP/1.0\r\nHost: localhost\r\n\r\n"
OUTPUT = REQUEST.replace(b"/api/status", b"/output")


GET = """
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 60) as sock:
    sock.sendall(bytes.fromhex(sys.argv[2]))
    while part := sock.recv(65536):
        print(part)
"""


async def status() -> RunStatus:
    return RunStatus("mnist", "host0:29400", 1.0, phase="running")


async def output() -> str:
    return "epoch 1"


RUN = ShownRun(status, output=output)


@contextmanager
def served(host: str) -> Iterator[int]:
    """Yield the port of a page at this host."""
    with serving(RUN, host, OURS) as page:
        assert page.url.startswith("https:" if host == "0.0.0.0" else "http:")
        yield int(page.url.rsplit(":", 1)[1].strip("/"))


def read(port: int, context: ssl.SSLContext | None, request: bytes = REQUEST) -> bytes:
    """Return the answer that a client gets."""
    with socket.create_connection(("127.0.0.1", port), GUARD_S) as plain:
        sock = plain if context is None else context.wrap_socket(plain)
        answer = b""
        try:
            sock.sendall(request)
            while part := sock.recv(65536):
                answer += part
        except OSError:
            return b""
        finally:
            sock.close()
        return answer


def test_other_machines_need_a_certificate_of_the_secret() -> None:
    without = ssl.create_default_context()
    without.check_hostname, without.verify_mode = False, ssl.CERT_NONE
    with served("0.0.0.0") as port:
        assert b'"run_id":"mnist"' in read(port, OURS.client_context)
        assert b"epoch 1" in read(port, OURS.client_context, OUTPUT)
        for context in (None, without):
            assert read(port, context) == b""
        with pytest.raises(ssl.SSLError):
            read(port, THEIRS.client_context)


def test_a_certificate_that_was_written_to_files_is_one(tmp_path: Path) -> None:
    pem = OURS.issue(("localhost",))
    (tmp_path / "cert.pem").write_bytes(pem.certificate + pem.key)
    context = ssl.create_default_context(cadata=pem.authorities.decode())
    context.load_cert_chain(tmp_path / "cert.pem")
    with served("0.0.0.0") as port:
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=context)
        context.check_hostname = False
        connection.request("GET", "/metrics")
        assert b"elastic_agent_phase" in connection.getresponse().read()
        connection.close()


@needs_other_users
def test_on_loopback_other_users_of_the_machine_are_refused() -> None:
    with served("127.0.0.1") as port:
        assert b'"run_id":"mnist"' in read(port, None)
        assert is_refused(OTHER_UID, "127.0.0.1", port, REQUEST)


@needs_other_users
def test_in_a_run_without_a_secret_other_users_read_the_page_and_no_output() -> None:
    with serving(RUN) as page:
        port = page.url.rsplit(":", 1)[1].strip("/")
        shown = [run_as(OTHER_UID, GET, port, request.hex()) for request in (REQUEST, OUTPUT)]
        assert ["200 OK" in shown[0], "403 Forbidden" in shown[1], "epoch" in shown[1]] == [True, True, False]
        assert b"epoch 1" in read(int(port), None, OUTPUT)


@pytest.mark.parametrize("is_told", [False, True])
def test_a_page_that_has_to_refuse_everyone_says_so_at_the_start(
    monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    """inet_diag is a module of the kernel that may be missing: then all sockets are unknown."""
    if not is_told:
        monkeypatch.setattr(peers, "_owner", lambda *_: None)

    async def open_and_close() -> None:
        page = open_status_page(Endpoint("127.0.0.1", 0), RUN, OURS)
        assert page is not None
        page.close()

    with structlog.testing.capture_logs() as logs:
        asyncio.run(open_and_close())
    (line,) = logs
    assert (line["log_level"], "modprobe tcp_diag" in line["event"]) == (("warning", True), ("info", False))[
        is_told
    ]
