"""The agent's end of the process in which its stores are served (:mod:`elastic_agent.store_servers`)."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from elastic_agent import linux, store_servers
from elastic_agent.transport.base import StoreLostError

ServeStore = Callable[[socket.socket, str], Callable[[], None]]
"""Serves a store on a listening socket, which becomes the store's. The text is the address of this machine at which the
socket listens. Returns what closes the store; raises ``StoreLostError`` if the server cannot be made."""

ANSWER_S = 35.0
"""The time that the process may take to make a server: a little longer than torch may."""
CLOSE_S = 1.0


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
        """Use the process at the other end of ``line``, or start one; it may still be importing torch.

        Raises:
            StoreLostError: it cannot be started.
        """
        self._line = line
        self._own: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None
        self._pidfd: int | None = None
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        """Held while an answer is awaited."""
        self._is_closed = False
        if line is None:
            self._start()

    @property
    def pid(self) -> int | None:
        """The process; None: there is none, or it is not known yet."""
        return self._own.pid if self._own is not None else self._pid

    def await_ready(self, while_waiting: Callable[[], object] = lambda: None) -> None:
        """Block until the process has imported torch; ``while_waiting`` is called about once a second.

        Raises:
            StoreLostError: it cannot be started.
        """
        with self._lock:
            self._ready_line(while_waiting)

    def serve(self, sock: socket.socket, address: str) -> Callable[[], None]:
        """Serve a store there (see :data:`ServeStore`)."""
        with sock, self._lock:
            number, line = next(self._numbers), self._ready_line()
            pid = self._pid
            error = self._request(line, {"serve": address, "number": number}, ANSWER_S, sock)
        if error:
            raise StoreLostError(error)
        return lambda: self._close_store(number, pid)

    def close(self) -> None:
        """End the process, and with it its stores; a thread that waits for it gets a StoreLostError."""
        self._is_closed = True
        line = self._line
        if line is not None:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._kill()
        if self._lock.acquire(timeout=CLOSE_S):
            self._drop_line()
            self._lock.release()

    def _close_store(self, number: int, pid: int | None) -> None:
        """Close a store; with a process that does not do so at once, all its stores end."""
        if not self._lock.acquire(timeout=CLOSE_S):
            return
        try:
            if self._line is not None and self._pid == pid:
                self._request(self._line, {"close": number}, CLOSE_S)
        finally:
            self._lock.release()

    def _ready_line(self, while_waiting: Callable[[], object] = lambda: None) -> socket.socket:
        while self._pid is None:
            if self._line is None:
                self._start()
            assert self._line is not None
            poll = select.poll()  # has no limit on the number of a file
            poll.register(self._line, select.POLLIN)
            while not poll.poll(1000):
                while_waiting()
            answer = self._receive(self._line)
            if answer is not None:
                self._pid = int(answer["pid"])
                with contextlib.suppress(OSError):  # it is gone, or Linux before 5.3
                    self._pidfd = os.pidfd_open(self._pid)
                break
            ended = self._own
            if ended is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    ended.wait(CLOSE_S)
            self._drop_line()  # if there was a spawner, it is gone
            if self._is_closed:
                raise StoreLostError("the stores were closed")
            if ended is not None:
                remedy = store_servers.memory_limit() or f"try {sys.executable} -c 'import torch'"
                raise StoreLostError(
                    f"the process that serves the stores ended (exit code {ended.returncode}) before it had imported "
                    f"torch; {remedy}"
                )
        assert self._line is not None
        return self._line

    def _start(self) -> None:
        if self._is_closed:
            raise StoreLostError("the stores were closed")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # By path, as the package may be found through the working directory alone, which -P does not search: files
        # there must not be taken for modules of Python.
        command = [sys.executable, "-P", store_servers.__file__, str(theirs.fileno())]
        try:
            with theirs, linux.signals_blocked():
                self._own = subprocess.Popen(
                    command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True
                )
        except OSError as error:
            ours.close()
            raise StoreLostError(f"cannot start the process that serves the stores: {error}") from None
        self._line = ours

    def _request(
        self,
        line: socket.socket,
        message: Mapping[str, Any],
        timeout_s: float,
        sock: socket.socket | None = None,
    ) -> str:
        """Return the error, in words, or nothing."""
        data = json.dumps(message).encode()
        try:
            line.settimeout(timeout_s)
            if sock is None:
                line.send(data)
            else:
                socket.send_fds(line, [data], [sock.fileno()])
            answer = self._receive(line)
        except OSError:
            answer = None
        if answer is None:
            self._drop_line()
            return "the process that serves the stores has died, or does not answer"
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
        self._kill()
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._line = self._own = self._pid = self._pidfd = None

    def _kill(self) -> None:
        """Kill it: it may be stopped, or importing torch, and would not see that its line is closed."""
        if self._own is not None:
            self._own.kill()
            self._own.wait()
        elif self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
