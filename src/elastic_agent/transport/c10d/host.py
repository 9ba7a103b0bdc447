"""A c10d store that this agent hosts."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable

from elastic_agent.store_servers import allow_many_connections
from elastic_agent.transport.addresses import (
    LOOPBACK_DOWN,
    connect,
    is_local,
    listen,
    loopback_is_down,
    resolve,
)
from elastic_agent.transport.base import NotAStoreError, StoreLostError, UnreachableError
from elastic_agent.transport.sealing import Secret
from elastic_agent.values import Endpoint

from .bootstrap import own_address
from .connection import holder_here
from .coordinator_link import C10dCoordinatorLink, C10dInbox
from .greeting import Doorkeeper, announce
from .keys import ROOT
from .report_link import C10dReportLink
from .sealed import sealed
from .server_process import ServeStore, serve_here
from .store import CALL_TIMEOUT_S, StoreClient
from .store_relay import keep_other_users_out


def find_or_host(
    endpoint: Endpoint,
    timeout_s: float,
    secret: Secret | None = None,
    serve: ServeStore = serve_here,
) -> C10dHost | None:
    """Host the store if there is none and the endpoint is this machine; None if there is one.

    Args:
        endpoint: of the store.
        timeout_s: how long to wait for an answer.
        secret: what clients need; None: every client is let in.
        serve: serves the store.

    Raises:
        UnreachableError: nothing answers, and the endpoint is another machine.
        NotAStoreError: something else listens there, or this machine has no loopback network to host it with.
    """
    if endpoint.port != 0:
        try:
            connect(endpoint.host, endpoint.port, timeout_s).close()
        except UnreachableError:
            if not is_local(resolve(endpoint.host)):
                raise
        else:
            return None
    if loopback_is_down():
        raise NotAStoreError(LOOPBACK_DOWN)
    try:
        sock = listen(endpoint.host, endpoint.port)
    except OSError as error:
        try:
            connect(endpoint.host, endpoint.port, timeout_s).close()  # another agent was quicker
        except UnreachableError:
            holder = holder_here(endpoint)
            has = f": {holder} has it" if holder else ""
            raise NotAStoreError(
                f"port {endpoint.port} of this machine cannot be used ({error.strerror}{has}) and no store "
                "answers there; use another port"
            ) from None
        return None
    return C10dHost(sock, secret, alone=endpoint.port == 0, serve=serve)


class C10dHost:
    """A store, and what its coordinator needs of it."""

    def __init__(
        self,
        sock: socket.socket,
        secret: Secret | None = None,
        *,
        alone: bool = False,
        serve: ServeStore = serve_here,
    ) -> None:
        """Serve on a listening socket.

        Args:
            sock: becomes the store's.
            secret: what clients need; None: nothing.
            alone: whether no other machine or user has a part in the run.
            serve: serves the store.

        Raises:
            StoreLostError: the server could not be made.
        """
        allow_many_connections()
        self.port = int(sock.getsockname()[1])
        self.store_id = secrets.token_hex(8)
        self._address = own_address(sock)
        self._shared: StoreClient | None = None
        """The connection of all coordinator's links: a run that is only a name must cost nothing."""
        self._doorkeeper = Doorkeeper(secret) if secret is not None else None
        self._relay = keep_other_users_out(sock, "the store of this run") if alone else None
        self._close_store: Callable[[], None] = lambda: None
        try:
            self._close_store = serve(
                sock if self._relay is None else self._relay.store_listener, self._address
            )
            self._open(secret)
        except BaseException:
            self.close()
            raise

    def _open(self, secret: Secret | None) -> None:
        """Write what clients look for."""
        client = self._client()
        # Before the id: clients wait for that.
        announce(client, secret)
        client.put(f"{ROOT}/id", self.store_id.encode())
        client.confirm()
        client.close()

    def inbox(self) -> C10dInbox:
        """The coordinator's inbox, on connections of its own."""
        return C10dInbox(self._client(), self._client(), doorkeeper=self._doorkeeper)

    def coordinator_link(self, run_id: str) -> C10dCoordinatorLink:
        """The coordinator's link to one run. All of them share a connection, and are used by one thread at a time."""
        if self._shared is not None:
            try:
                self._shared.confirm()
            except StoreLostError:
                self._shared = None
        if self._shared is None:
            self._shared = self._client()
        return C10dCoordinatorLink(self._sealed(self._shared, run_id), run_id, doorkeeper=self._doorkeeper)

    def report_link(self, run_id: str) -> C10dReportLink:
        """A connection to one run's reports, for any thread."""
        return C10dReportLink(self._sealed(self._client(), run_id), run_id)

    def _sealed(self, client: StoreClient, run_id: str) -> StoreClient:
        return sealed(client, self._doorkeeper.seals(run_id)) if self._doorkeeper is not None else client

    def _client(self) -> StoreClient:
        return StoreClient.connect(self._address, self.port, CALL_TIMEOUT_S)

    def close(self) -> None:
        """Stop serving."""
        self._close_store()
        if self._relay is not None:
            self._relay.close()
