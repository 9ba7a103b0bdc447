"""Serves the status page over HTTP: the page itself, JSON, metrics and probes. Read-only.

Requests are answered in threads of their own, and the status is determined in the agent's event loop at most once a
second, however many clients ask.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import ipaddress
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from elastic_agent.diagnosis.status import RunStatus
from elastic_agent.logs import get_logger
from elastic_agent.values import Endpoint

from .metrics import CONTENT_TYPE, MetricsUnavailableError, metrics_text

FRESH_S = 1.0
"""A status of this age is shown again."""

ANSWER_S = 5.0
"""How long the event loop may take to determine the status."""

IDLE_S = 10.0
"""How long a client may take to send a request."""

CLIENTS = 32
"""How many are served at the same time; the others are turned away."""

GetStatus = Callable[[], Awaitable[RunStatus]]


class StatusServer:
    """Serves the status of one run until closed."""

    def __init__(self, address: Endpoint, get_status: GetStatus) -> None:
        """Listen at ``address`` (port 0: any free one), and serve once :meth:`start` is called.

        Raises:
            OSError: the address cannot be used.
        """
        self._get_status = get_status
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._known: tuple[float, RunStatus] | None = None
        self._http = _Server(address, self)
        host = address.host
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._http.server_port}/"
        """Where to reach it."""

    def start(self) -> None:
        """Serve from now on; the status is determined in the running event loop."""
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._http.serve_forever, name="status-page", daemon=True).start()

    def close(self) -> None:
        """Stop serving; does not wait for clients."""
        if self._loop is not None:
            self._loop = None
            threading.Thread(target=self._http.shutdown, name="status-page-end", daemon=True).start()
        self._http.server_close()

    def status(self) -> RunStatus:
        """The status of the run, at most :data:`FRESH_S` old; called by the threads of clients.

        Raises:
            TimeoutError: the event loop does not answer, or has ended.
        """
        with self._lock:
            now_s = time.monotonic()
            if self._known is not None and now_s - self._known[0] < FRESH_S:
                return self._known[1]
            loop = self._loop
            if loop is None or loop.is_closed():
                raise TimeoutError("the agent has ended")
            answer = asyncio.run_coroutine_threadsafe(self._determine(), loop)
            try:
                status = answer.result(ANSWER_S)
            except TimeoutError:
                answer.cancel()
                raise TimeoutError(f"the agent did not answer within {ANSWER_S:g} s") from None
            self._known = time.monotonic(), status
            return status

    async def _determine(self) -> RunStatus:
        return await self._get_status()


def open_status_page(address: Endpoint | None, get_status: GetStatus) -> StatusServer | None:
    """Serve the status at this address from now on; None without an address, or if it cannot be used (logged)."""
    if address is None:
        return None
    log = get_logger()
    try:
        page = StatusServer(address, get_status)
    except OSError as error:
        log.warning(
            f"no status page: --status-port {address} cannot be used: {error.strerror or error}; the run continues"
        )
        return None
    page.start()
    log.info(f"status page at {page.url}")
    return page


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 2 * CLIENTS
    block_on_close = False

    def __init__(self, address: Endpoint, source: StatusServer) -> None:
        self.source = source
        self.is_local = _is_loopback(address.host)
        self._places = threading.BoundedSemaphore(CLIENTS)
        if ":" in address.host:
            self.address_family = socket.AF_INET6
        super().__init__((address.host, address.port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no error of the agent."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = IDLE_S
    server_version = "elastic-agent"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer a request."""
        if self.server.is_local and not self._asks_for_this_machine():
            self._text(HTTPStatus.FORBIDDEN, "this page is served to clients on this machine only\n")
            return
        route = {
            "/": self._page,
            "/api/status": self._api,
            "/metrics": self._metrics,
            "/healthz": self._health,
            "/readyz": self._readiness,
        }.get(self.path.partition("?")[0])
        if route is None:
            self._text(HTTPStatus.NOT_FOUND, "there is /, /api/status, /metrics, /healthz and /readyz\n")
            return
        try:
            route()
        except TimeoutError as error:
            self._text(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n")

    do_HEAD = do_GET  # noqa: N815 - http.server looks for this name

    def _asks_for_this_machine(self) -> bool:
        """Whether the name in the request is this machine's: a page of another site cannot read the answer then."""
        host = self.headers.get("Host", "")
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        return _is_loopback(name.strip("[]"))

    def _page(self) -> None:
        page = importlib.resources.files(__package__).joinpath("page.html").read_bytes()
        self._answer(HTTPStatus.OK, "text/html; charset=utf-8", page)

    def _api(self) -> None:
        status = self.server.source.status()
        self._answer(HTTPStatus.OK, "application/json", msgspec.json.encode(status))

    def _metrics(self) -> None:
        try:
            text = metrics_text(self.server.source.status())
        except MetricsUnavailableError as error:
            self._text(HTTPStatus.NOT_IMPLEMENTED, f"{error}\n")
            return
        self._answer(HTTPStatus.OK, CONTENT_TYPE, text)

    def _health(self) -> None:
        self.server.source.status()
        self._text(HTTPStatus.OK, "ok\n")

    def _readiness(self) -> None:
        status = self.server.source.status()
        if status.phase == "running":
            self._text(HTTPStatus.OK, "running\n")
        else:
            self._text(HTTPStatus.SERVICE_UNAVAILABLE, f"{status.phase or 'not formed yet'}\n")

    def _text(self, status: HTTPStatus, text: str) -> None:
        self._answer(status, "text/plain; charset=utf-8", text.encode(errors="replace"))

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header(
            "Content-Security-Policy",
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
            "connect-src 'self'; img-src data:",
        )
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        """Requests are not logged."""


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
