#!/usr/bin/env bash
# Python 3.10 to 3.13, asyncio: loop.connect_accepted_socket leaves Nagle's algorithm on for a TCP socket that was accepted by
# a listener of socket.create_server, and loop.create_connection(sock=...) for one that socket.socket(AF_INET, SOCK_STREAM)
# has made. A relay of small requests and answers then waits up to 40 ms for delayed acknowledgements. For sockets that
# asyncio makes itself (open_connection) it is off.
# One would guess: it is off for each of them. The documentation of asyncio's event loop says: "The socket option TCP_NODELAY
# is set by default for all TCP connections" (changed in 3.6).
# Source: Lib/asyncio/base_events.py, _set_nodelay: it looks at sock.proto, which is 0 ("the default") for these sockets;
# asyncio's own come from getaddrinfo, which says IPPROTO_TCP.
set -euo pipefail
python3 - <<'PYTHON'
import asyncio
import platform
import socket


def sends_at_once(transport: asyncio.BaseTransport) -> bool:
    return bool(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))


async def look() -> tuple[bool, bool, bool]:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        given = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        given.connect(listener.getsockname())
        accepted, _ = listener.accept()
        dialled, _ = await loop.create_connection(asyncio.Protocol, sock=given)
        served, _ = await loop.connect_accepted_socket(asyncio.Protocol, accepted)
        own, _ = await loop.create_connection(asyncio.Protocol, *listener.getsockname())
        found = sends_at_once(served), sends_at_once(dialled), sends_at_once(own)
        for transport in (dialled, served, own):
            transport.close()
        return found


found = asyncio.run(look())
print(f"Python {platform.python_version()}: TCP_NODELAY of an accepted, a given, an own socket: {found}")
raise SystemExit(found != (False, False, True))
PYTHON
