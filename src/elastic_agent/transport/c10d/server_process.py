"""The agent's end of the process in which its stores are served (:mod:`elastic_agent.store_servers`)."""

from __future__ import annotations

import array
import itertools
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from elastic_agent import store_servers
from elastic_agent.transport.base import StoreLostError

ServeStore = Callable[[socket.socket, str], Callable[[], None]]
"""Serves a store on a listening socket, which becomes the store's. The text is the address of this machine at which the
socket listens. Returns what closes the store; raises ``StoreLostError`` if the server cannot be made."""

ANSWER_S = 60.0


def serve_here(sock: socket.socket, address: str) -> Callable[[], None]:
    """Serve a store in this process, which imports torch (see :data:`ServeStore`)."""
    store_servers.allow_many_connections()
    try:
        stores = [store_servers.serve_store(sock, address)]
    except RuntimeError as error:
        raise StoreLostError(store_servers.first_line(error)) from None
    return stores.clear


class StoreServers:
    """Serves stores in a process of their own; it is made again if it has died, without its stores."""

    def __init__(self, line: socket.socket | None) -> None:
        """Use the process at the other end of ``line``, or start one; it may still be importing torch."""
        self._line = line
        self._own: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self.pid: int | None = None
        """The process, as soon as it is ready; None: there is none."""
        if line is None:
            self._start()

    def await_ready(self) -> None:
        """Block until the process has imported torch.

        Raises:
            StoreLostError: it could not be started.
        """
        with self._lock:
            self._ready_line()

    def serve(self, sock: socket.socket, address: str) -> Callable[[], None]:
        """Serve a store there (see :data:`ServeStore`)."""
        with self._lock:
            number, line = next(self._numbers), self._ready_line()
            try:
                error = self._request(line, {"serve": address, "number": number}, sock)
            finally:
                sock.close()
            pid = self.pid
        if error:
            raise StoreLostError(error)
        return lambda: self._close_store(number, pid)

    def close(self) -> None:
        """End the process, and with it its stores."""
        with self._lock:
            self._drop_line()

    def _close_store(self, number: int, pid: int | None) -> None:
        with self._lock:
            if self._line is not None and self.pid == pid:
                self._request(self._line, {"close": number})

    def _ready_line(self) -> socket.socket:
        while self.pid is None:
            if self._line is None:
                self._start()
            assert self._line is not None
            answer = self._receive(self._line)
            if answer is None and self._own is not None:
                code = self._own.wait()
                self._drop_line()
                raise StoreLostError(
                    f"the process that serves the stores ended ({code}) before it had imported torch; try "
                    f"{sys.executable} -c 'import torch'"
                )
            if answer is None:  # there is no spawner any more
                self._drop_line()
            else:
                self.pid = answer["pid"]
        assert self._line is not None
        return self._line

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-m", "elastic_agent.store_servers", str(theirs.fileno())]
        with theirs:
            self._own = subprocess.Popen(
                command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._line = ours

    def _request(
        self, line: socket.socket, message: Mapping[str, Any], sock: socket.socket | None = None
    ) -> str:
        """Return the error, in words, or nothing."""
        fds = (
            []
            if sock is None
            else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [sock.fileno()]))]
        )
        try:
            line.settimeout(ANSWER_S)
            line.sendmsg([json.dumps(message).encode()], fds)
            answer = self._receive(line)
        except OSError:
            answer = None
        if answer is None:
            self._drop_line()
            return "the process that serves the stores has died"
        return str(answer["error"])

    def _receive(self, line: socket.socket) -> dict[str, Any] | None:
        try:
            data = line.recv(store_servers.MESSAGE_BYTES)
        except OSError:
            return None
        return json.loads(data) if data else None

    def _drop_line(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line = self.pid = None
        if self._own is not None:
            self._own.kill()  # it may still be importing torch
            self._own.wait()
            self._own = None
