"""Serves the status of runs over HTTP: a page, JSON and metrics. Read-only.

Requests are answered in threads of their own, and the status of a run is determined at most once a second, however
many clients ask.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

import msgspec

from elastic_agent.logs import get_logger
from elastic_agent.monitoring.status import RunStatus
from elastic_agent.transport import Secret, peer_uid
from elastic_agent.values import Endpoint

from .metrics import CONTENT_TYPE, metrics_text

FRESH_S = 1.0
"""A status of this age is shown again."""

IDLE_S = 10.0
"""How long a client may take to send a request."""

CLIENTS = 32
"""How many are served at the same time; the others are turned away."""

HTML = "text/html; charset=utf-8"

MOST_RUNS = 100
"""The metrics and the page contain so many runs, the newest."""


class StatusSource(Protocol):
    """Where a status page has its content from. All methods are called by the threads of clients."""

    def run_ids(self) -> Sequence[str]:
        """The runs that are known, the newest last.

        Raises:
            TimeoutError: the process that knows them does not answer.
        """

    def status(self, run_id: str) -> RunStatus:
        """The status of one of them.

        Raises:
            TimeoutError: the process that knows it does not answer.
            LookupError: there is no such run.
        """


class StatusServer:
    """Serves the status of runs until closed."""

    def __init__(self, address: Endpoint, source: StatusSource, secret: Secret | None = None) -> None:
        """Listen, and serve once :meth:`start` is called.

        Args:
            address: where; port 0: any free one.
            source: of what is shown.
            secret: what clients need: in TLS, or on a loopback address to be a process of this user or root; None:
                nothing.

        Raises:
            OSError: the address cannot be used.
        """
        self._source = source
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, RunStatus]] = {}
        self._http = _Server(address, self, secret)
        host, scheme = address.host, "https" if self._http.in_tls is not None else "http"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{self._http.server_port}/"
        """Where to reach it."""

    @property
    def refuses_everyone(self) -> bool:
        """Whether only processes of this user are to be served, and the kernel does not tell which these are."""
        if not self._http.is_for_this_user:
            return False
        with (
            socket.create_server(
                (str(self._http.server_address[0]), 0), family=self._http.address_family
            ) as own,
            socket.create_connection(own.getsockname()[:2]),
            own.accept()[0] as accepted,
        ):
            return not self._http.verify_request(accepted, None)

    def start(self) -> None:
        """Serve from now on, in threads."""
        threading.Thread(target=self._http.serve_forever, name="status-page", daemon=True).start()

    def close(self) -> None:
        """Stop serving; does not wait for clients."""
        threading.Thread(target=self._http.shutdown, name="status-page-end", daemon=True).start()
        self._http.server_close()

    def status(self, run_id: str | None = None) -> RunStatus:
        """The status of a run, at most :data:`FRESH_S` old; by default of the only one.

        Raises:
            TimeoutError: the process that knows it does not answer.
            LookupError: there is no such run, or there are several and none was named; the message says so.
        """
        run_ids = self.run_ids()
        if run_id is None:
            if len(run_ids) != 1:
                raise LookupError(
                    f"there are {len(run_ids)} runs here; name one: ?run=RUN (the page at / lists them)"
                )
            run_id = run_ids[0]
        elif run_id not in run_ids:
            raise LookupError("there is no run of this name here; the page at / lists those that there are")
        with self._lock:
            known = self._known.get(run_id)
            if known is not None and time.monotonic() - known[0] < FRESH_S:
                return known[1]
            status = self._source.status(run_id)
            self._known[run_id] = time.monotonic(), status
            for gone in self._known.keys() - set(run_ids):
                del self._known[gone]
            return status

    def run_ids(self) -> list[str]:
        """The newest runs, the newest last."""
        return list(self._source.run_ids())[-MOST_RUNS:]

    def statuses(self) -> list[RunStatus]:
        """Of the newest runs.

        Raises:
            TimeoutError: the process that knows them does not answer.
        """
        found = []
        for one in self.run_ids():
            try:
                found.append(self.status(one))
            except LookupError:
                continue  # removed meanwhile
        return found


def open_status_page(
    address: Endpoint | None, source: StatusSource, secret: Secret | None = None
) -> StatusServer | None:
    """Serve the status from now on; None without an address, or if it cannot be used (logged).

    Arguments as for :class:`StatusServer`.
    """
    if address is None:
        return None
    log = get_logger()
    try:
        page = StatusServer(address, source, secret)
        refuses_everyone = page.refuses_everyone
    except OSError as error:
        log.warning(
            f"no status page: --status-port {address} cannot be used: {error.strerror or error}; everything else "
            "continues"
        )
        return None
    page.start()
    if refuses_everyone:
        log.warning(
            f"the status page at {page.url} refuses everyone, as this kernel does not tell whose a connection is "
            "(inet_diag); as root, modprobe tcp_diag and start again, or name an address that is not loopback "
            "(--status-port HOST:PORT), where clients need the secret instead"
        )
    else:
        log.info(f"status page at {page.url}")
    return page


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 2 * CLIENTS
    block_on_close = False

    def __init__(self, address: Endpoint, source: StatusServer, secret: Secret | None) -> None:
        self.pages = source
        self.is_local = _is_loopback(address.host)
        self.in_tls = secret.server_context if secret is not None and not self.is_local else None
        self.is_for_this_user = secret is not None and self.is_local
        self._places = threading.BoundedSemaphore(CLIENTS)
        if ":" in address.host:
            self.address_family = socket.AF_INET6
        super().__init__((address.host, address.port), _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; its thread shakes hands, with the first bytes that it reads."""
        request, address = super().get_request()
        if self.in_tls is not None:
            request = self.in_tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        return request, address

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether to serve this client, which has shown nothing yet."""
        try:
            return not self.is_for_this_user or peer_uid(request) in (os.geteuid(), 0)
        except OSError:  # it is gone, or the kernel does not tell
            return False

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
        route = self._routes().get(self.path.partition("?")[0])
        if route is None:
            shown = ", ".join(self._routes())
            self._text(HTTPStatus.NOT_FOUND, f"there is {shown}\n")
            return
        try:
            route()
        except TimeoutError as error:
            self._problem(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        except LookupError as error:
            self._problem(HTTPStatus.NOT_FOUND, str(error.args[0] if error.args else error))

    do_HEAD = do_GET  # noqa: N815 - http.server looks for this name

    def _routes(self) -> dict[str, Callable[[], None]]:
        return {
            "/": self._page,
            "/api/status": self._status,
            "/metrics": self._metrics,
        }

    def _asks_for_this_machine(self) -> bool:
        """Whether the name in the request is this machine's: a page of another site cannot read the answer then."""
        host = self.headers.get("Host", "")
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        return _is_loopback(name.strip("[]"))

    def _page(self) -> None:
        # Here and not above: most agents serve no page.
        from .page import run_page, runs_page

        pages, query = self.server.pages, self._query()
        name = query.get("run")
        if name is None and len(pages.run_ids()) != 1:
            page = runs_page(pages.statuses())
        else:
            page = run_page(pages.status(name), is_named=name is not None, shows_all="all" in query)
        self._answer(HTTPStatus.OK, HTML, page)

    def _query(self) -> dict[str, str]:
        try:
            return {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        except ValueError:
            return {}

    def _status(self) -> None:
        status = self.server.pages.status(self._query().get("run"))
        self._answer(HTTPStatus.OK, "application/json", msgspec.json.encode(status))

    def _metrics(self) -> None:
        self._answer(HTTPStatus.OK, CONTENT_TYPE, metrics_text(self.server.pages.statuses()))

    def _problem(self, status: HTTPStatus, problem: str) -> None:
        if self.path.partition("?")[0] == "/":
            from .page import problem_page

            self._answer(status, HTML, problem_page(problem))
        else:
            self._text(status, f"{problem}\n")

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
