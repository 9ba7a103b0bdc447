"""Serves the status of a run over HTTP: a page, JSON and metrics. Read-only, in the agent's event loop.

The status is determined at most once a second, however many clients ask.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from elastic_agent.logs import get_logger
from elastic_agent.monitoring.status import RunStatus
from elastic_agent.transport import Secret, check_peers_are_told, peer_uid
from elastic_agent.values import Endpoint

from .metrics import CONTENT_TYPE, metrics_text
from .plots import Sample

FRESH_S = 1.0
"""A status of this age is shown again."""

IDLE_S = 10.0
"""The time that a client may take to send a request."""

NEWS_S, TOLD_S = 2.0, 0.5
"""The longest wait for the end of the run, by clients that prefer to wait; and the time that telling it may take."""

MOST_CLIENTS = 256
"""The number of clients that are served at the same time, open pages included, which nearly always wait for the end of
the run; others are turned away."""

LONGEST_REQUEST = 64 * 1024

HTML, TEXT = "text/html; charset=utf-8", "text/plain; charset=utf-8"

HEADERS = (
    "Server: elastic-agent",
    "Cache-Control: no-store",
    "X-Content-Type-Options: nosniff",
    (
        "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:"
    ),
    "Connection: close",
)


@dataclass(frozen=True)
class ShownRun:
    """The run that is shown."""

    status: Callable[[], Awaitable[RunStatus]]
    """Determines its status."""
    samples: Sequence[Sample] = ()
    """The training of this agent's node so far."""
    output: Callable[[], Awaitable[str]] | None = None
    """Reads what the workers on this machine wrote last."""


_Content = tuple[HTTPStatus, str, bytes]
"""Code, kind and body of an answer."""


class _Target(NamedTuple):
    """The target of a request, as far as answers differ."""

    path: str
    shows_all: bool


class StatusServer:
    """Serves the status of a run until closed. For the event loop."""

    def __init__(self, address: Endpoint, run: ShownRun, secret: Secret | None = None) -> None:
        """Listen, and serve from now on.

        Args:
            address: where; port 0: any free one.
            run: what is shown.
            secret: what clients need: in TLS, or on a loopback address to be a process of this user or root; None:
                nothing.

        Raises:
            OSError: the address cannot be used.
        """
        from . import page  # here and not above: most agents serve no page

        self._html = page
        self._run = run
        self._is_local = _is_loopback(address.host)
        self._tls = secret.server_context if secret is not None and not self._is_local else None
        self._is_for_this_user = secret is not None and self._is_local
        self._written: dict[_Target, tuple[float, _Content]] = {}
        """Answers, and when they were written."""
        self._writes, self._reads = asyncio.Lock(), asyncio.Lock()
        """The latter for the output of workers: a disk that hangs delays nothing else."""
        self._clients: set[asyncio.Task[None]] = set()
        self._last: asyncio.Future[RunStatus] = asyncio.get_running_loop().create_future()
        host = address.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, address.port), family=family, backlog=MOST_CLIENTS)
        port, scheme = self._listener.getsockname()[1], "https" if self._tls is not None else "http"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/"
        """Where to reach it."""
        self._listener.setblocking(False)
        self._accepting = asyncio.get_running_loop().create_task(self._accept())
        self._accepting.add_done_callback(lambda _: self._listener.close())

    async def _accept(self) -> None:
        """Accept clients; those that are too many, or not welcome, are turned away before anything is read."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(self._listener)
            except OSError:  # the client has gone, or this process has no descriptor left for it
                await asyncio.sleep(FRESH_S)
                continue
            if len(self._clients) >= MOST_CLIENTS or (self._is_for_this_user and not _is_this_user(client)):
                client.close()
                continue
            serving = loop.create_task(self._attend(client))
            self._clients.add(serving)
            serving.add_done_callback(self._clients.discard)

    def check_clients_are_known(self) -> None:
        """Raise OSError if only this user is to be served, and the kernel does not report whose a connection is."""
        if self._is_for_this_user:
            check_peers_are_told(self._listener.getsockname()[0], self._listener.family)

    async def tell_end(self, last: RunStatus) -> None:
        """Show those who are connected the last status of the run."""
        self._last.set_result(last)
        if self._clients:
            await asyncio.wait(self._clients, timeout=TOLD_S)

    def close(self) -> None:
        """Stop serving; does not wait for clients."""
        for task in (self._accepting, *self._clients):
            task.cancel()

    async def _attend(self, client: socket.socket) -> None:
        """Answer one request, and close the connection."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(LONGEST_REQUEST)
        protocol = asyncio.StreamReaderProtocol(reader)
        writer = None
        try:
            async with asyncio.timeout(IDLE_S):
                transport, _ = await loop.connect_accepted_socket(lambda: protocol, client, ssl=self._tls)
                writer = asyncio.StreamWriter(transport, protocol, reader, loop)
                head = await reader.readuntil(b"\r\n\r\n")
            async with asyncio.timeout(IDLE_S):
                writer.write(await self._answer(head.decode("latin-1"), client))
            async with asyncio.timeout(IDLE_S):
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, asyncio.LimitOverrunError):
            pass  # it has gone, is slow, or uses another protocol: no error of the agent
        finally:
            if writer is not None:  # else asyncio has closed the connection
                writer.transport.abort()

    async def _answer(self, head: str, client: socket.socket) -> bytes:
        request, *lines = head.split("\r\n")
        method, _, rest = request.partition(" ")
        path, _, query = rest.partition(" ")[0].partition("?")
        target = _Target(path, query == "all=1")
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }
        if method not in ("GET", "HEAD"):
            code, kind, body = HTTPStatus.NOT_IMPLEMENTED, TEXT, b"this page can only be read\n"
        elif self._is_local and not _means_this_machine(headers.get("host", "")):
            code, kind = HTTPStatus.FORBIDDEN, TEXT
            body = b"this page is served to clients on this machine only\n"
        elif target.path == "/output" and not (self._tls or (self._is_local and _is_this_user(client))):
            code, kind = HTTPStatus.FORBIDDEN, TEXT
            body = b"output is for the agent's user and root, on this machine (ssh -L) or with the run's secret\n"
        else:
            if headers.get("prefer") == "wait":
                await asyncio.wait([self._last], timeout=NEWS_S)
            code, kind, body = await self._recent_content(target)
        top = (
            f"HTTP/1.0 {code.value} {code.phrase}",
            f"Content-Type: {kind}",
            f"Content-Length: {len(body)}",
        )
        shown = body if method != "HEAD" else b""
        return "\r\n".join((*top, *HEADERS, "", "")).encode() + shown

    async def _recent_content(self, target: _Target) -> _Content:
        """Return the answer to a request for this target, at most :data:`FRESH_S` old.

        A page of a thousand nodes takes 0.1 s to write, in the loop that renews the lease.
        """
        async with self._reads if target.path == "/output" else self._writes:
            known = self._written.get(target)
            now_s = time.monotonic()
            if known is not None and now_s - known[0] < FRESH_S and not self._last.done():
                return known[1]
            self._written = {
                other: written for other, written in self._written.items() if now_s - written[0] < FRESH_S
            }
            content = await self._content(target)
            self._written[target] = time.monotonic(), content
            return content

    async def _content(self, target: _Target) -> _Content:
        match target.path:
            case "/":
                page = self._html.run_page(
                    await self._status(), self._run.samples, shows_all=target.shows_all
                )
                return HTTPStatus.OK, HTML, page
            case "/api/status":
                return HTTPStatus.OK, "application/json", msgspec.json.encode(await self._status())
            case "/output" if self._run.output is not None:
                text = await self._run.output() or "nothing yet\n"
                return HTTPStatus.OK, TEXT, text.encode(errors="replace")
            case "/metrics":
                return HTTPStatus.OK, CONTENT_TYPE, metrics_text(await self._status())
        output = ", /output" if self._run.output is not None else ""
        return HTTPStatus.NOT_FOUND, TEXT, f"there is /, /api/status, /metrics{output}\n".encode()

    async def _status(self) -> RunStatus:
        return self._last.result() if self._last.done() else await self._run.status()


def open_status_page(
    address: Endpoint | None, run: ShownRun, secret: Secret | None = None
) -> StatusServer | None:
    """Serve the status from now on; None without an address, or if it cannot be used (logged).

    Arguments as for :class:`StatusServer`.
    """
    if address is None:
        return None
    log = get_logger()
    try:
        page = StatusServer(address, run, secret)
    except OSError as error:
        log.warning(
            f"no status page: --status-port {address} cannot be used: {error.strerror or error}; everything else "
            "continues"
        )
        return None
    try:
        page.check_clients_are_known()
        log.info(f"status page at {page.url}")
    except OSError as error:
        log.warning(
            f"the status page at {page.url} refuses everyone: {error.strerror or error}; as root, modprobe tcp_diag "
            "and start again, or name an address that is not loopback (--status-port HOST:PORT), where clients need "
            "the secret instead"
        )
    return page


def _is_this_user(client: socket.socket) -> bool:
    """Return whether a client on this machine is a process of this user or root."""
    try:
        return peer_uid(client) in (os.geteuid(), 0)
    except OSError:  # it is gone, or the kernel does not answer
        return False


def _means_this_machine(host: str) -> bool:
    """Return whether the name in a request is this machine's: a page of another site cannot read the answer then."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    return _is_loopback(name.strip("[]"))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
