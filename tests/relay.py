"""A TCP relay in front of a server, which can hold back what is sent through it."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self

from elastic_agent.values import Endpoint


class Relay:
    """Passes everything on in both directions; :meth:`hold` keeps back what is sent from then on.

    Connections stay open meanwhile, as in a partition of a network: neither side is told.
    """

    def __init__(self, target_port: int, *, both_ways: bool = False, keeps: bool = False) -> None:
        """Prepare.

        Args:
            target_port: of the server, on 127.0.0.1.
            both_ways: hold the server's answers, too.
            keeps: keep everything in ``passed``.
        """
        self._target_port = target_port
        self._both_ways = both_ways
        self._open = threading.Event()
        self._open.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = {self._listener}
        self.endpoint = Endpoint("127.0.0.1", self._listener.getsockname()[1])
        self.held = threading.Event()
        """Set when there is something held back."""
        self._keeps = keeps
        self.passed = bytearray()
        """What was passed on in both directions."""

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.set()
        for sock in [*self._sockets]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def cut(self) -> None:
        """Break the connections there are now."""
        for sock in self._sockets - {self._listener}:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def hold(self) -> None:
        """Pass nothing on until :meth:`release`."""
        self.held.clear()
        self._open.clear()

    def release(self) -> None:
        """Pass on what was held back, and everything after it."""
        self._open.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target_port))
                except OSError:  # it is down: the client is to notice that
                    client.close()
                    continue
                self._sockets |= {client, server}
                threading.Thread(target=self._serve, args=(client, server), daemon=True).start()

    def _serve(self, client: socket.socket, server: socket.socket) -> None:
        """Pass on what both sides send, until both have ended."""
        answers = threading.Thread(target=self._pump, args=(server, client, self._both_ways), daemon=True)
        answers.start()
        self._pump(client, server, can_hold=True)
        answers.join()
        for sock in (client, server):
            self._sockets.discard(sock)
            sock.close()

    def _pump(self, source: socket.socket, sink: socket.socket, can_hold: bool) -> None:
        try:
            while data := source.recv(65536):
                if can_hold and not self._open.is_set():
                    self.held.set()
                    self._open.wait()
                sink.sendall(data)
                if self._keeps:
                    self.passed += data
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # one side is gone: so is the other
            for sock in (source, sink):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
