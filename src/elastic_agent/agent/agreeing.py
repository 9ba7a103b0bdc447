"""Agreeing on a run id where none was given."""

from __future__ import annotations

import asyncio

from elastic_agent.agent.reporting.console import ConsoleReporter
from elastic_agent.rendezvous.asyncio_runner import run_abandonable
from elastic_agent.rendezvous.backends.base import RendezvousBackend
from elastic_agent.rendezvous.backends.c10d.backend import DIAL_TIMEOUT_S
from elastic_agent.transport import StoreLostError, UnreachableError

REDIAL_S = 0.5


async def agree_on_run(backend: RendezvousBackend, fingerprint: str, console: ConsoleReporter) -> str:
    """The id of this job's run at the endpoint; dials until somebody answers.

    Raises:
        NotAStoreError: something else answers there.
    """
    while True:
        try:
            run_id = await run_abandonable(lambda: backend.agree(fingerprint), 6 * DIAL_TIMEOUT_S)
        except (UnreachableError, StoreLostError) as error:
            console.disconnected(str(error))
            await asyncio.sleep(REDIAL_S)
        else:
            console.connected(False)
            return run_id
