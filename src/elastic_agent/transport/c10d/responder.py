"""Identifies the connections of this user to the workers' bootstrap store, for the agent that hosts it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading

from elastic_agent.protocol import Address
from elastic_agent.transport.addresses import connect, set_up_for_messages
from elastic_agent.transport.base import NotAStoreError, Obstacle, TransportError, UnreachableError
from elastic_agent.transport.peers import check_peers_are_told, connection_uid
from elastic_agent.transport.sealing import Seal

from .identification import AgentEnd, Answer, Ends, IdentificationError

REDIALS_S = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Pauses before the attempts to open a broken channel again. After the last one, the store is considered closed."""

_CHUNK_BYTES = 1 << 14


class Responder:
    """A channel to the relay before a bootstrap store, and the thread that answers its questions."""

    def __init__(self, address: Address, seal: Seal, timeout_s: float) -> None:
        """Open the channel: the store's host has the secret of the run, and knows that this agent has it.

        Args:
            address: of the bootstrap store.
            seal: of all agents of the run.
            timeout_s: how long to wait for the connection, and for the answer.

        Raises:
            TransportError: there is no answer, or not that of an agent with the secret; or the kernel does not
                report the owners of connections. The message is one line.
        """
        check_users_are_told()
        self._address = address
        self._seal = seal
        self._timeout_s = timeout_s
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._sock, self._end = self._open()
        self._thread = threading.Thread(target=self._run, name="identification", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the channel; connections from this machine are not admitted any more."""
        with self._lock:
            self._closing.set()
            _hang_up(self._sock)

    def _open(self) -> tuple[socket.socket, AgentEnd]:
        shown = str(self._address)
        try:
            sock = connect(self._address.host, self._address.port, self._timeout_s)
        except UnreachableError as error:
            raise UnreachableError(f"{shown}: {error}", error.obstacle) from None
        end = AgentEnd(self._seal)
        try:
            set_up_for_messages(sock)
            sock.sendall(end.hello())
            while not end.is_open:
                data = sock.recv(_CHUNK_BYTES)
                if not data:
                    raise UnreachableError(
                        f"{shown} closed the connection without an answer; all nodes need the same --secret-file"
                    )
                end.received(data)
            sock.sendall(end.proof())
            sock.settimeout(None)
        except BaseException as error:
            sock.close()
            if isinstance(error, TimeoutError):
                raise UnreachableError(
                    f"{shown} accepts connections but did not answer within {self._timeout_s:g} s",
                    Obstacle.SILENT,
                ) from None
            if isinstance(error, IdentificationError):
                raise NotAStoreError(f"{shown} is not the bootstrap store of this run: {error}") from None
            if isinstance(error, OSError):
                raise UnreachableError(f"{shown}: {error.strerror or error}") from None
            raise
        return sock, end

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with contextlib.suppress(OSError, IdentificationError):
                self._answer_all()
            if not self._reopened():
                return

    def _answer_all(self) -> None:
        """Until the relay closes the channel."""
        while data := self._sock.recv(_CHUNK_BYTES):
            for question in self._end.received(data):
                answer = Answer(question.number, is_same_users(question.ends))
                self._sock.sendall(self._end.answer(answer))

    def _reopened(self) -> bool:
        """Open the channel again, for workers that connect later; False if it is closed for good."""
        with self._lock:
            self._sock.close()
        for pause_s in REDIALS_S:
            if self._closing.wait(pause_s):
                return False
            try:
                sock, end = self._open()
            except NotAStoreError:  # another store has the port now
                return False
            except TransportError:
                continue
            with self._lock:
                self._sock, self._end = sock, end
                if self._closing.is_set():
                    _hang_up(sock)
            return True
        return False


def _hang_up(sock: socket.socket) -> None:
    """Also wakes a thread that waits for something to arrive."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def check_users_are_told() -> None:
    """Raise ``TransportError`` if the kernel does not report the owners of connections."""
    try:
        check_peers_are_told("127.0.0.1", socket.AF_INET)
    except OSError as error:
        raise TransportError(
            "with a secret, only processes of this user may connect to the bootstrap store, and the kernel of this "
            f"machine does not report the owners of connections ({error.strerror or error}): modprobe tcp_diag"
        ) from None


def is_same_users(ends: Ends) -> bool:
    """Whether this machine is the client of this connection, with a process of this user."""
    version = ipaddress.ip_address(ends.client[0]).version
    if version != ipaddress.ip_address(ends.server[0]).version:
        return False
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    try:
        return connection_uid(family, ends.client, ends.server) == os.geteuid()
    except OSError:
        return False
