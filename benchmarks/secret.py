"""What a secret costs: a connection to the store and a call in TLS, from another process.

The forming of many nodes with a secret is in :mod:`.rendezvous`.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from elastic_agent.testing.ports import free_port
from elastic_agent.transport import Secret, c10d
from elastic_agent.values import Endpoint

from .figures import Figure, Result
from .options import Options

SECRET = Secret((b"a secret of the benchmark",))
VALUE = b"x" * 700
"""As large as a record."""
DIALS, CALLS = 50, 500
PATIENCE_S = 30.0
NOTE = "Client and host are two processes of one machine; each sample is the median of 50 connections or 500 calls."


def run(options: Options) -> Result:
    """Measure, in turns without a secret and with one."""
    figures = {
        (what, who): Figure(what, who, "ms")
        for what in ("connection", "call")
        for who in ("without a secret", "with a secret")
    }
    for _ in range(options.times):
        for who, secret in (("without a secret", None), ("with a secret", SECRET)):
            with hosted(secret) as endpoint:
                took = asyncio.run(measure(endpoint, secret))
            figures["connection", who].add(took[0])
            figures["call", who].add(took[1])
    return Result("secret", list(figures.values()), [NOTE])


async def measure(endpoint: Endpoint, secret: Secret | None) -> tuple[float, float]:
    """How long a connection and a call take."""
    table = await c10d.open_table(endpoint, PATIENCE_S, secret)
    await table.put("key", VALUE)
    dial_ms = await median_ms(DIALS, lambda: connect(endpoint, secret))
    call_ms = await median_ms(CALLS, lambda: table.read(["key"]))
    table.close()
    return dial_ms, call_ms


async def connect(endpoint: Endpoint, secret: Secret | None) -> None:
    """Make a connection, as an agent does."""
    (await c10d.open_table(endpoint, PATIENCE_S, secret)).close()


async def median_ms(times: int, work: Callable[[], Awaitable[object]]) -> float:
    """How long the work takes."""
    took_s = []
    for _ in range(times):
        begun_s = time.perf_counter()
        await work()
        took_s.append(time.perf_counter() - begun_s)
    return statistics.median(took_s) * 1000


@contextmanager
def hosted(secret: Secret | None) -> Iterator[Endpoint]:
    """A store in another process."""
    endpoint = Endpoint("127.0.0.1", free_port())
    command = [sys.executable, "-m", "benchmarks.secret", str(endpoint.port), *(["secret"] if secret else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as hosting:
        try:
            assert hosting.stdout is not None
            hosting.stdout.readline()
            yield endpoint
        finally:
            hosting.kill()


def main(words: list[str]) -> None:
    """Be the process of the host, until it is killed."""
    asyncio.run(host(int(words[0]), SECRET if words[1:] else None))


async def host(port: int, secret: Secret | None) -> None:
    """Serve a store until stdin ends."""
    store = await c10d.find_or_host(Endpoint("127.0.0.1", port), PATIENCE_S, secret)
    print(store is not None, flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    main(sys.argv[1:])
