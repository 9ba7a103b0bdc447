"""A blocking client of torch's TCPStore server that does not import torch."""

from __future__ import annotations

import secrets
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from elastic_agent.transport import tcpstore_wire as wire
from elastic_agent.transport.addresses import set_up_for_messages
from elastic_agent.transport.base import StoreLostError, not_a_store

MOST_READ_BYTES = 1 << 28
"""A value to which clients append may be larger than one that is sent at once."""

_CHUNK_BYTES = 1 << 16
_LEAST_WAIT_S = 0.001
"""A socket whose time-out is 0 does not block at all."""


class TCPStoreConnection:
    """One connection, which may be used by several threads: their calls wait for each other.

    Every call raises:
        StoreLostError: no answer in time, or none that this protocol has, or the connection broke; whether the call was
            carried out is not known. All later calls raise it too.
        ValueError: a key or a value is larger than the server accepts; nothing was sent.
    """

    def __init__(self, sock: socket.socket, shown: str, call_timeout_s: float) -> None:
        """Use a socket that is connected to a store, which has answered (:func:`.wire.probe_store`).

        Args:
            sock: becomes the connection's.
            shown: the store's address, for messages.
            call_timeout_s: how long each call may take.

        Raises:
            StoreLostError: the connection broke meanwhile.
        """
        self._sock = sock
        self._shown = shown
        self._call_timeout_s = call_timeout_s
        self._received = b""
        self._position = 0
        """How much of it has been read."""
        self._ends_s = 0.0
        """When the present call is late, by time.monotonic()."""
        self._failure: StoreLostError | None = None
        self._lock = threading.Lock()
        weakref.finalize(self, sock.close)  # nothing uses it any more
        with self._call():
            set_up_for_messages(sock)

    # -- calls with an answer -------------------------------------------------------------------

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of these keys, in their order; an empty one for a key that is not there."""
        request = _request(wire.Request.MULTI_GET, wire.packed_keys(keys))
        with self._call():
            self._send(request)
            return [self._read_value() for _ in keys]

    def list_keys(self) -> list[str]:
        """Return all keys, in no order."""
        with self._call():
            self._send(_request(wire.Request.LIST_KEYS))
            keys = [self._read_value() for _ in range(wire.size_in(self._read(8)))]
        return [key.decode(errors="surrogateescape").removeprefix("/") for key in keys]

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Store ``desired`` if the value is ``expected``, and return the value that is there then.

        An empty ``expected`` stands for a key that is not there. If one is not, but another value was expected, the
        server returns ``expected``.
        """
        arguments = wire.packed_key(key) + wire.packed_value(expected) + wire.packed_value(desired)
        request = _request(wire.Request.COMPARE_SET, arguments)
        with self._call():
            self._send(request)
            return self._read_value()

    def delete_key(self, key: str) -> bool:
        """Delete a key; returns whether it was there."""
        request = _request(wire.Request.DELETE, wire.packed_key(key))
        with self._call():
            self._send(request)
            return self._read_number() > 0

    def ping(self) -> None:
        """Return when the server has carried out everything sent before: it works off a connection in order."""
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        with self._call():
            self._send(wire.ping(nonce))
            answer = self._read(len(nonce))
            if answer != nonce:
                raise self._unexpected(answer)

    def queue_pop(self, queue: str) -> bytes | None:
        """Remove the first item of a queue and return it; None if there is none."""
        request = _request(wire.Request.QUEUE_POP, wire.packed_key(queue))
        with self._call():
            self._send(request)
            return self._read_value() if self._read_number() > 0 else None

    def wait(self, key: str, timeout_s: float) -> bool:
        """Block until the key, or the queue of this name, is there; False at the time-out."""
        request = _request(wire.Request.WAIT, wire.packed_keys([key]))
        with self._call():
            self._send(request)
            is_there = self._is_readable_within(timeout_s)
            if not is_there:
                self._send(_request(wire.Request.CANCEL_WAIT))
            answer = self._read(1)
            if answer == wire.STOP_WAITING and not is_there:  # the answers crossed
                self._read(1)
            return answer == wire.STOP_WAITING

    # -- calls without an answer ----------------------------------------------------------------

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        self._tell(_request(wire.Request.SET, wire.packed_key(key) + wire.packed_value(value)))

    def queue_push(self, queue: str, item: bytes) -> None:
        """Add to the end of a queue."""
        self._tell(_request(wire.Request.QUEUE_PUSH, wire.packed_key(queue) + wire.packed_value(item)))

    def _tell(self, request: bytes) -> None:
        with self._call():
            self._send(request)

    def close(self) -> None:
        """Close the connection; never blocks. A call in progress raises StoreLostError."""
        self._fail(StoreLostError("the connection was closed"))
        with suppress(OSError):  # it is not connected any more
            # Not the method of a socket in TLS, after which that would send what it is given as it is.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # wakes the thread of that call
        if self._lock.acquire(blocking=False):
            self._sock.close()
            self._lock.release()

    # -- one call -------------------------------------------------------------------------------

    @contextmanager
    def _call(self) -> Iterator[None]:
        with self._lock:
            self._check_open()
            self._ends_s = time.monotonic() + self._call_timeout_s
            try:
                yield
            except BaseException as error:
                # What the server still answers would be taken for the answer to a later call.
                self._fail(self._lost(error))
                self._sock.close()
                if isinstance(error, OSError):
                    self._check_open()
                raise

    def _check_open(self) -> None:
        if self._failure is not None:
            self._sock.close()
            raise self._failure from None

    def _fail(self, failure: StoreLostError) -> None:
        if self._failure is None:
            self._failure = failure

    def _lost(self, error: BaseException) -> StoreLostError:
        if isinstance(error, StoreLostError):
            return error
        if isinstance(error, TimeoutError):
            return StoreLostError(f"{self._shown} did not answer within {self._call_timeout_s:g} s")
        reason = error.strerror if isinstance(error, OSError) else None
        return StoreLostError(f"{self._shown} closed the connection" + (f" ({reason})" if reason else ""))

    def _unexpected(self, answer: bytes) -> StoreLostError:
        return StoreLostError(str(not_a_store(self._shown, answer)))

    def _send(self, request: bytes) -> None:
        self._set_time_left()
        self._sock.sendall(request)

    def _set_time_left(self) -> None:
        left_s = self._ends_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(left_s)

    def _is_readable_within(self, timeout_s: float) -> bool:
        """Wait for an answer, which extends the call by as much."""
        self._sock.settimeout(max(_LEAST_WAIT_S, timeout_s))
        try:
            self._receive(_CHUNK_BYTES)
        except TimeoutError:
            return False
        finally:
            self._ends_s = time.monotonic() + self._call_timeout_s
        return True

    def _receive(self, size: int) -> None:
        more = self._sock.recv(size)
        if not more:
            raise ConnectionResetError
        self._received = self._received[self._position :] + more
        self._position = 0

    def _read(self, size: int) -> bytes:
        while len(self._received) - self._position < size:
            self._set_time_left()
            self._receive(max(_CHUNK_BYTES, size))
        data = self._received[self._position : self._position + size]
        self._position += size
        return data

    def _read_value(self) -> bytes:
        header = self._read(8)
        size = wire.size_in(header)
        if size > MOST_READ_BYTES:
            raise self._unexpected(header)
        return self._read(size)

    def _read_number(self) -> int:
        return wire.number_in(self._read(8))


def _request(kind: wire.Request, arguments: bytes = b"") -> bytes:
    return bytes([kind]) + arguments
