"""Hosts the etcd member of one machine, as an agent would, until it is killed or gets SIGTERM.

Run as ``python -m tests.rendezvous.member_host ENDPOINT HOST FOLDER SECRET``; HOST is the machine,
SECRET hexadecimal and may be empty. It logs to its standard streams.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from elastic_agent.config.value_types import parse_endpoints
from elastic_agent.logs import configure_logging
from elastic_agent.rendezvous.backends.members.hosting import Hosting
from elastic_agent.transport import Secret
from elastic_agent.values import DEFAULT_PORT

SUPERVISING = "supervising the member"


async def _host(endpoint: str, host: str, folder: str, secret: str) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    known = Secret((bytes.fromhex(secret),)) if secret else None
    hosting = Hosting(parse_endpoints(endpoint, DEFAULT_PORT), Path(folder), known, host)
    hosting.begin()
    while not hosting.is_supervising and not stopped.is_set():
        await asyncio.sleep(0.01)
    print(SUPERVISING, flush=True)
    await stopped.wait()
    await hosting.end()


if __name__ == "__main__":
    configure_logging("console", "info", sys.stderr)
    asyncio.run(_host(*sys.argv[1:]))
