"""A c10d store that this agent hosts."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
import socket
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass

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
from elastic_agent.transport.blocking_call import run_abandonable
from elastic_agent.transport.certificates import Secret
from elastic_agent.transport.coordinator_records import CoordinatorRecords, records_of
from elastic_agent.transport.keys import STORE_ID, RunKeys, name_in
from elastic_agent.transport.records import begun_runs, life_of
from elastic_agent.values import Endpoint

from .bootstrap import own_address
from .dialling import LOOK_UP_S, reach
from .relay import StoreRelay, keep_other_users_out
from .server_process import ANSWER_S, ServeStore, serve_here
from .table import CALL_TIMEOUT_S, C10dTable

_WHAT = "the store of this run"

LOOPBACK = "127.0.0.1"

MAX_HINTS = 4096
"""The most hints that are taken at once; the rest is taken the next time."""
KEPT_RUNS = 8
"""The number of ended runs whose reports are kept: nodes read them when the run's other records are gone already."""

SERVE_S = 4 * ANSWER_S
"""The time that making a server may take: its process may have to import torch first, from a slow disk."""


async def find_or_host(
    endpoint: Endpoint,
    timeout_s: float,
    secret: Secret | None = None,
    serve: ServeStore = serve_here,
    *,
    alone: bool = False,
) -> C10dHost | None:
    """Host the store if there is none and the endpoint is this machine; None if there is one.

    Args:
        endpoint: of the store.
        timeout_s: how long to wait for an answer.
        secret: what clients need; None: every client is let in.
        serve: serves the store.
        alone: whether no other machine or user has a part in the run: clients need no secret; with port 0, none has.

    Raises:
        UnreachableError: nothing answers, and the endpoint is another machine.
        NotAStoreError: something else listens there, or this machine has no means to host it, or to keep others out.
        StoreLostError: the server could not be made.
    """
    sock = await run_abandonable(
        lambda: _free_port(endpoint, timeout_s),
        2 * timeout_s + 3 * LOOK_UP_S,
        too_late=lambda late: late.close() if late is not None else None,
    )
    if sock is None:
        return None
    return await C10dHost.make(sock, secret, alone=alone or endpoint.port == 0, serve=serve)


def _free_port(endpoint: Endpoint, timeout_s: float) -> socket.socket | None:
    """Return a listening socket for a new store; None if something listens at the endpoint."""
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
        return listen(endpoint.host, endpoint.port)
    except OSError as error:
        try:
            connect(endpoint.host, endpoint.port, timeout_s).close()  # another agent was quicker
        except UnreachableError:
            raise NotAStoreError(
                f"port {endpoint.port} of this machine cannot be used ({error.strerror}) and no store answers there; "
                f"use another port, or stop what `ss -ltnp` shows for port {endpoint.port}"
            ) from None
        return None


@dataclass(eq=False, repr=False)
class C10dHost:
    """A store, and what its coordinator needs of it. It takes a while to begin to serve: see :meth:`make`."""

    sock: socket.socket
    """Becomes the store's."""
    secret: Secret | None
    """What clients need, in TLS; None: nothing."""
    _: KW_ONLY
    alone: bool
    """No other machine or user has a part in the run: clients need no secret."""
    serve: ServeStore
    """Serves the store."""

    def __post_init__(self) -> None:
        """Serve on the socket.

        Raises:
            NotAStoreError: this machine has no means to keep clients without the secret from the store.
            StoreLostError: the server could not be made.
        """
        allow_many_connections()
        self.port = int(self.sock.getsockname()[1])
        self.store_id = secrets.token_hex(8)
        self._relay: StoreRelay | None = None
        self._close_store: Callable[[], None] = lambda: None
        if self.alone:
            self._relay = keep_other_users_out(self.sock, _WHAT)
        elif self.secret is not None:
            self._relay = _secure_relay(self.sock, self.secret)
        listener = self.sock if self._relay is None else self._relay.store_listener
        self._own_port = self.port if self._relay is None else self._relay.port
        self._address = LOOPBACK if self.secret is not None and not self.alone else own_address(self.sock)
        try:
            self._close_store = self.serve(listener, self._address)
            asyncio.run(self._name_store())  # clients wait for it
        except BaseException:
            self.close()
            raise

    @classmethod
    async def make(
        cls,
        sock: socket.socket,
        secret: Secret | None = None,
        *,
        alone: bool = False,
        serve: ServeStore = serve_here,
    ) -> C10dHost:
        """Serve on a listening socket, so that clients find a store; arguments and errors as above."""
        return await run_abandonable(
            lambda: cls(sock, secret, alone=alone, serve=serve), SERVE_S, too_late=cls.close
        )

    async def _name_store(self) -> None:
        with contextlib.closing(await self._table()) as table:
            await table.put(STORE_ID, self.store_id.encode())

    async def inbox(self) -> C10dInbox:
        """Return what the coordinator needs, on connections of its own."""
        waiting = await self._table()
        try:
            return C10dInbox(waiting, await self._table())
        except BaseException:
            waiting.close()
            raise

    async def _table(self) -> C10dTable:
        return C10dTable(await reach(Endpoint(self._address, self._own_port), CALL_TIMEOUT_S))

    def close(self) -> None:
        """Stop serving; nothing happens if that was done already."""
        close_store, self._close_store = self._close_store, lambda: None
        close_store()
        if self._relay is not None:
            self._relay.close()


@dataclass(eq=False, repr=False)
class C10dInbox:
    """Hints for the coordinator, and the records of all runs of the store."""

    waiting: C10dTable
    """A connection that the wait for hints occupies."""
    requests: C10dTable
    """One for everything else, as a run that is only a name must cost nothing."""

    def __post_init__(self) -> None:
        self._ended: dict[str, None] = {}
        """Runs that were removed but for their reports."""

    async def wait(self, timeout_s: float) -> list[tuple[str, str]]:
        """Wait until a hint comes; all that are there, as (run id, incarnation). Empty at the time-out.

        Raises:
            StoreLostError: the store is gone.
        """
        items = await self.waiting.take_hints(timeout_s, MAX_HINTS)
        return [hint for item in dict.fromkeys(items) if (hint := _hint_in(item)) is not None]

    def close(self) -> None:
        """Close its connections; a wait raises StoreLostError."""
        self.waiting.close()
        self.requests.close()

    async def runs(self) -> Collection[str]:
        """Return every run that has begun here."""
        return await begun_runs(self.requests)

    async def records(self, run_id: str) -> CoordinatorRecords | None:
        """Return the coordinator's records of one run; None if it has none."""
        return await records_of(self.requests, RunKeys(run_id))

    async def ended(self, run_id: str) -> None:
        """Keep the reports of a run that was removed, and remove those of the oldest such runs."""
        self._ended.pop(run_id, None)
        self._ended[run_id] = None
        while len(self._ended) > KEPT_RUNS:
            oldest = RunKeys(next(iter(self._ended)))
            del self._ended[oldest.run_id]
            if await life_of(self.requests, oldest) is None:
                await self.requests.delete((), oldest.folder)


def _hint_in(item: bytes) -> tuple[str, str] | None:
    """Return the run and the incarnation; None if it is no hint of ours."""
    run_id, _, incarnation = item[:512].partition(b" ")
    names = name_in(run_id), name_in(incarnation)
    return (names[0], names[1]) if names[0] is not None and names[1] is not None else None


def _secure_relay(sock: socket.socket, secret: Secret) -> StoreRelay:
    """Return what lets only clients with the secret in at ``sock``, which it closes in case of an error.

    Raises:
        NotAStoreError: this machine has no means to keep others from the store behind it.
        StoreLostError: there are no sockets left for it at present.
    """
    inner: socket.socket | None = None
    try:
        inner = listen(LOOPBACK, 0)
        return StoreRelay(inner, _WHAT, (sock, secret.server_context))
    except OSError as error:
        for listener in (inner, sock):
            if listener is not None:
                listener.close()
        reason = error.strerror or str(error)
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRINUSE):
            raise StoreLostError(f"cannot host a store: {reason}") from None
        raise NotAStoreError(
            "cannot host a store with a secret: other users of this machine could connect to it "
            f"({reason}); as root, modprobe tcp_diag, or give the --rdzv-endpoint of another machine"
        ) from None
