"""A name server that does not answer, which is what a node of a firewalled cluster often has."""

from __future__ import annotations

from pathlib import Path

import pytest

from .support import in_a_namespace, needs_namespaces

PREPARE = """
set -e
ip link set lo up
echo nameserver 127.0.0.53 > "$2"
mount --bind "$2" /etc/resolv.conf
exec "$0" -c "$1"
"""

SILENT_SERVER = """
import socket, threading, time
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.53", 53))
"""

LOOK_UP = """
from elastic_agent.name_lookups import shorten_lookups
shorten_lookups()
def look_up():
    started_s = time.monotonic()
    try:
        socket.getnameinfo(("192.0.2.1", 80), socket.NI_NAMEREQD)
    except socket.gaierror:
        print(time.monotonic() - started_s)
thread = threading.Thread(target=look_up)
thread.start()
thread.join()
"""

MEET = """
import asyncio
from elastic_agent.transport import c10d
from elastic_agent.values import Endpoint
async def meet():
    host = await c10d.find_or_host(Endpoint("127.0.0.1", 29400), 5.0)
    for _ in range(20):
        await c10d.dial(Endpoint("127.0.0.1", 29400), "run", 5.0)
    host.close()
started_s = time.monotonic()
asyncio.run(meet())
print(time.monotonic() - started_s)
server.setblocking(False)
try:
    print("asked:", server.recv(512))
except BlockingIOError:
    print("asked nothing")
"""


def seen_with_a_silent_name_server(script: str, folder: Path) -> list[str]:
    """Return what the script prints, line by line."""
    return in_a_namespace(PREPARE, SILENT_SERVER + script, str(folder / "resolv.conf")).splitlines()


@pytest.mark.prove
@needs_namespaces
def test_a_lookup_ends_after_two_seconds_instead_of_ten(tmp_path: Path) -> None:
    (took,) = seen_with_a_silent_name_server(LOOK_UP, tmp_path)
    assert 1.0 < float(took) < 5.0


@pytest.mark.prove
@needs_namespaces
def test_a_connection_to_the_store_sends_no_dns_query(tmp_path: Path) -> None:
    """torch would look up the name of each address, 10 s and more, and call the store unreachable."""
    took, asked = seen_with_a_silent_name_server(MEET, tmp_path)
    assert asked == "asked nothing"
    assert float(took) < 5.0, "20 connections, without a wait"
