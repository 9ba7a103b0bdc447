"""A TCP relay in front of a server, which can hold back what was sent through it."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self

from elastic_agent.values import Endpoint


class Relay:
    """Passes everything on in both directions; :meth:`hold` keeps back what clients send from then on."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._open = threading.Event()
        self._open.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self.endpoint = Endpoint("127.0.0.1", self._listener.getsockname()[1])
        self.held = threading.Event()
        """Set when there is something held back."""

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.set()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def hold(self) -> None:
        self.held.clear()
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target_port))
                self._sockets += (client, server)
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(
                        target=self._pump, args=(source, sink, source is client), daemon=True
                    ).start()

    def _pump(self, source: socket.socket, sink: socket.socket, can_hold: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if can_hold and not self._open.is_set():
                    self.held.set()
                    self._open.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
