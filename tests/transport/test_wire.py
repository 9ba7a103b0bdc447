"""Our greeting is torch's private language: these fail when a new torch speaks another."""

from __future__ import annotations

import contextlib
import socket
import threading
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from elastic_agent.transport.addresses import connect
from elastic_agent.transport.base import UnreachableError
from elastic_agent.transport.c10d.wire import probe_store

from .support import PATIENCE_S


def test_torchs_server_accepts_our_probe() -> None:
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
    for _ in range(3):
        with connect("127.0.0.1", server.port, 5.0) as sock:
            probe_store(sock, 5.0, "the store")


def test_our_probe_equals_the_first_message_of_torchs_client() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])

        def dial() -> None:
            with contextlib.suppress(RuntimeError):
                TCPStore("127.0.0.1", port, None, False, timedelta(seconds=1), wait_for_workers=False)

        thread = threading.Thread(target=dial, daemon=True)
        thread.start()
        theirs = _overhear(server)
    thread.join(PATIENCE_S)
    with socket.create_server(("127.0.0.1", 0)) as server, connect(*server.getsockname(), 5.0) as sock:
        thread = threading.Thread(target=lambda: _refused(sock), daemon=True)
        thread.start()
        ours = _overhear(server)
    thread.join(PATIENCE_S)
    assert len(theirs) == len(ours) == 10
    assert theirs[:6] == ours[:6], "all but the number that is to be echoed"


def _overhear(server: socket.socket) -> bytes:
    """What the next caller says before it gets an answer."""
    caller, _ = server.accept()
    with caller:
        caller.settimeout(PATIENCE_S)
        said = caller.recv(100)
        while len(said) < 10:
            more = caller.recv(100)
            if not more:
                break
            said += more
        return said


def _refused(sock: socket.socket) -> None:
    with pytest.raises(UnreachableError):
        probe_store(sock, PATIENCE_S, "the store")
