"""A connection to a c10d store: the calls that the links of a run are made of."""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence

from elastic_agent.transport.addresses import connect

from .tcpstore import TCPStoreConnection
from .wire import probe_store

CALL_TIMEOUT_S = 10.0

MAX_COMPARED_BYTES = 4 * 1024 * 1024
"""A larger value was appended to by another program, and may be too large for a message."""

_BATCH = 512


class StoreClient:
    """One connection. Its calls wait for each other; each raises :class:`StoreLostError` when the store is gone."""

    def __init__(self, open_connection: TCPStoreConnection) -> None:
        """Use a connection."""
        self._store = open_connection

    @classmethod
    def on(cls, sock: socket.socket, shown: str) -> StoreClient:
        """Use a socket that is connected to a store, which has answered; it becomes the client's.

        Raises:
            StoreLostError: the connection broke meanwhile.
        """
        return cls(TCPStoreConnection(sock, shown, CALL_TIMEOUT_S))

    @classmethod
    def connect(cls, host: str, port: int, timeout_s: float) -> StoreClient:
        """Connect; ``timeout_s``: how long the connection may take, and then the first answer.

        Raises:
            UnreachableError: nothing answers in time.
            NotAStoreError: something else answers.
            StoreLostError: the connection broke meanwhile.
        """
        shown = f"{host}:{port}"
        sock = connect(host, port, timeout_s)
        try:
            probe_store(sock, timeout_s, shown)
        except BaseException:
            sock.close()
            raise
        return cls.on(sock, shown)

    # -- reading, never blocking on what is not there -------------------------------------------

    def peek(self, key: str) -> bytes | None:
        """The value, or None."""
        return self._store.get_if_there(key)

    def peek_many(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The values of those keys that exist."""
        found: dict[str, bytes | None] = {}
        for start in range(0, len(keys), _BATCH):
            batch = keys[start : start + _BATCH]
            found.update(zip(batch, self._store.get(batch), strict=True))
        for key, value in found.items():
            if not value:  # missing, or written by another program
                found[key] = self._store.get_if_there(key)
        return {key: value for key, value in found.items() if value is not None}

    # -- writing --------------------------------------------------------------------------------

    def put(self, key: str, value: bytes) -> None:
        """Write without waiting for an answer; :meth:`confirm` waits for all that was sent."""
        self._store.set(key, value)

    def append(self, key: str, line: str) -> None:
        """Add a line to the value in one step on the server, without waiting for an answer."""
        self._store.append(key, f"{line}\n".encode())

    def push(self, queue: str, item: str) -> None:
        """Add to the end of a queue, without waiting for an answer."""
        self._store.queue_push(queue, item.encode())

    def exchange(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Compare-and-set; the value afterwards. ``b""`` is expected of a missing key.

        For a missing key with another expected value, the answer is that expected value: only the answer
        ``desired`` means success. A value that may be too large to be sent is removed first.
        """
        if len(expected) > MAX_COMPARED_BYTES:
            if self.peek(key) == expected:
                self.delete([key])
            expected = b""
        return self._store.compare_set(key, expected, desired)

    def delete(self, keys: Collection[str]) -> None:
        """Remove the keys that exist."""
        for key in keys:
            self._store.delete_key(key)

    def confirm(self) -> None:
        """Return when the server has carried out everything sent before."""
        self._store.ping()

    # -- waiting --------------------------------------------------------------------------------

    def wait(self, key: str, timeout_s: float) -> bool:
        """Block until the key exists; False at the time-out."""
        return self._store.wait(key, timeout_s)

    def pop(self, queue: str, timeout_s: float, most: int) -> list[bytes]:
        """Block until the queue has an item; that and what else is there, up to ``most``. Empty at the time-out."""
        items: list[bytes] = []
        if self._store.wait(queue, timeout_s):
            while len(items) < most and (item := self._store.queue_pop(queue)) is not None:
                items.append(item)
        return items

    def close(self) -> None:
        """Close the connection; a call in progress raises ``StoreLostError``."""
        self._store.close()
