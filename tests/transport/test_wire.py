"""Our greeting is torch's private language: these fail when a new torch speaks another."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from torch.distributed import TCPStore

from elastic_agent.transport.c10d import check_store
from elastic_agent.values import Endpoint
from tests.loop_thread import in_loop

from .support import PATIENCE_S


def test_torchs_server_accepts_our_greeting() -> None:
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
    for _ in range(3):
        in_loop(check_store(Endpoint("127.0.0.1", server.port), PATIENCE_S))


def test_our_greeting_equals_the_first_message_of_torchs_client() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
        patience = timedelta(seconds=PATIENCE_S)
        theirs = _overhear(
            server, lambda: TCPStore("127.0.0.1", port, None, False, patience, wait_for_workers=False)
        )
        ours = _overhear(server, lambda: in_loop(check_store(Endpoint("127.0.0.1", port), PATIENCE_S)))
    assert len(theirs) == len(ours) == 10
    assert theirs[:6] == ours[:6], "all but the number that is to be echoed"


def _overhear(server: socket.socket, dial: Callable[[], object]) -> bytes:
    """Return what a client says first; it gets the answer that a store would give."""
    with ThreadPoolExecutor(1) as pool:
        dialled = pool.submit(dial)
        caller, _ = server.accept()
        with caller:
            caller.settimeout(PATIENCE_S)
            said = caller.recv(100)
            while len(said) < 10 and (more := caller.recv(100)):
                said += more
            caller.sendall(said[6:])
            dialled.result(PATIENCE_S)
        return said
