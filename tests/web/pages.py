"""Serves status pages in an event loop of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from elastic_agent.transport import Secret
from elastic_agent.values import Endpoint
from elastic_agent.web.server import ShownRun, StatusServer
from tests.loop_thread import background_loop, in_loop


@contextmanager
def serving(run: ShownRun, host: str = "127.0.0.1", secret: Secret | None = None) -> Iterator[StatusServer]:
    """Serve the status of this run."""

    async def opened() -> StatusServer:
        return StatusServer(Endpoint(host, 0), run, secret)

    server = in_loop(opened())
    try:
        yield server
    finally:
        background_loop().call_soon_threadsafe(server.close)
