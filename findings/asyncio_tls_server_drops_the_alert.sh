#!/usr/bin/env bash
# Python 3.11 and 3.13, asyncio: a TLS server that demands client certificates (CERT_REQUIRED) refuses a client without one
# by closing the connection. The client's handshake succeeds (TLS 1.3), and its next recv returns b"", an ordinary end. With
# the same context, a server that uses ssl.SSLContext.wrap_socket sends the alert, and the client's recv raises SSLError
# "certificate required". A client of asyncio's server thus cannot tell a refusal from a server that has died, and goes on
# dialling.
# One would guess: the alert that OpenSSL has written is sent in both, as RFC 8446 (4.4.2.4, 6.2) demands of the server.
# Source: Lib/asyncio/sslproto.py: after an SSLError, _do_handshake ends the connection without _process_outgoing, which
# would send what is in the outgoing BIO.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder" && "$folder/bin/pip" install --quiet trustme==1.2.1
"$folder/bin/python" - <<'PYTHON'
import asyncio
import contextlib
import platform
import socket
import ssl
import threading

import trustme

authority = trustme.CA()
server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
authority.issue_cert("localhost").configure_cert(server_context)
authority.configure_trust(server_context)
server_context.verify_mode = ssl.CERT_REQUIRED
client_context = ssl.create_default_context()
authority.configure_trust(client_context)


def end_without_certificate(port: int) -> str:
    with socket.create_connection(("127.0.0.1", port), 30) as plain:
        secured = client_context.wrap_socket(plain, server_hostname="localhost")
        try:
            return repr(secured.recv(16))
        except ssl.SSLError as error:
            return str(error.reason)


def serve_blocking(listener: socket.socket) -> None:
    accepted, _ = listener.accept()
    with accepted, contextlib.suppress(ssl.SSLError):
        server_context.wrap_socket(accepted, server_side=True)


async def end_at_asyncio() -> str:
    server = await asyncio.start_server(
        lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=server_context
    )
    return await asyncio.to_thread(end_without_certificate, server.sockets[0].getsockname()[1])


with socket.create_server(("127.0.0.1", 0)) as listener:
    thread = threading.Thread(target=serve_blocking, args=(listener,))
    thread.start()
    blocking = end_without_certificate(listener.getsockname()[1])
    thread.join()
at_asyncio = asyncio.run(end_at_asyncio())
print(f"Python {platform.python_version()}, {ssl.OPENSSL_VERSION}: wrap_socket: {blocking}; asyncio: {at_asyncio}")
raise SystemExit("CERTIFICATE_REQUIRED" not in blocking or at_asyncio != "b''")
PYTHON
