"""The first messages of a connection to etcd, sent over a plain socket: TLS, and the beginning of HTTP/2.

If a port is not etcd's, or a certificate is wrong, gRPC reports little more than that the connection broke; and if
a member is frozen, nothing before a call's time-out. So before gRPC is used, a plain socket with a time-out (and
Python's TLS) determines what answers there and, if it is not an etcd that grants access, what is wrong and what to
do.
"""

from __future__ import annotations

import socket
import ssl

from elastic_agent.transport.addresses import connect
from elastic_agent.transport.base import NotAStoreError, Obstacle, TransportError, UnreachableError
from elastic_agent.transport.c10d import wire
from elastic_agent.values import Endpoint, EtcdAccess

_FRAME_HEADER, _SETTINGS = 9, 4
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0))
"""The preface of an HTTP/2 client, and settings without any parameter."""

_SECOND_LOOK_S = 0.15
"""Once something is wrong: how long to look for what it is. The time-out covers this too."""

_NOT_YET_VALID, _EXPIRED = 9, 10
_WRONG_NAME = (62, 64)
"""OpenSSL's error numbers for a bad certificate; all others mean that no trusted authority issued it."""


def probe_server(sock: socket.socket, endpoint: Endpoint, access: EtcdAccess, timeout_s: float) -> None:
    """Return if something that may be etcd is at the other end of the new connection ``sock``, and grants access.

    Raises:
        UnreachableError: it does not answer in time, or closes the connection: another attempt may succeed.
        NotAStoreError: it never will.
    """
    sock.settimeout(max(timeout_s - _SECOND_LOOK_S, timeout_s / 2))
    context = _context(access) if access.tls else None
    stream = sock
    try:
        if context is not None:
            stream = context.wrap_socket(sock, server_hostname=endpoint.host)
        stream.sendall(_HELLO)
        answer = _receive(stream)
    except TimeoutError:
        raise _silent(endpoint, timeout_s) from None
    except ssl.SSLCertVerificationError as error:
        raise _bad_certificate(error, endpoint, access) from None
    except ssl.SSLError as error:
        raise _bad_tls(error, endpoint, access) from None
    except OSError:
        answer = b""
    finally:
        if stream is not sock:
            stream.close()
    if not _is_etcds(answer):
        raise _other_answer(answer, endpoint, access)


def _receive(stream: socket.socket) -> bytes:
    """As much as is needed to identify the server; less at the end of the connection."""
    data = b""
    while len(data) < _FRAME_HEADER and (more := stream.recv(64)):
        data += more
    return data


def _is_etcds(answer: bytes) -> bool:
    """Whether it begins as every server of HTTP/2 does."""
    return len(answer) >= _FRAME_HEADER and answer[3] == _SETTINGS


# -- our own certificates -------------------------------------------------------------------------


def _context(access: EtcdAccess) -> ssl.SSLContext:
    """TLS with our certificates.

    Raises:
        NotAStoreError: a file is not what it should be.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    try:
        if access.ca is None:  # gRPC verifies against its own list of authorities
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        else:
            context.load_verify_locations(access.ca)
    except OSError as error:
        raise _bad_file(error, f"{access.ca}", "trusted CA certificates (PEM)") from None
    try:
        if access.cert is not None:
            context.load_cert_chain(access.cert, access.key, lambda: "")  # or OpenSSL asks at the terminal
    except OSError as error:
        files = f"{access.cert} and {access.key}"
        raise _bad_file(error, files, "a certificate and its key without a passphrase (PEM)") from None
    return context


def _bad_file(error: OSError, files: str, expected: str) -> NotAStoreError:
    why = error.reason or "not PEM" if isinstance(error, ssl.SSLError) else error.strerror
    return NotAStoreError(f"{files}: {str(why).replace('_', ' ').lower()}; expected {expected} for etcd")


# -- what is wrong --------------------------------------------------------------------------------


def _bad_certificate(
    error: ssl.SSLCertVerificationError, endpoint: Endpoint, access: EtcdAccess
) -> NotAStoreError:
    if error.verify_code == _EXPIRED:
        what = "has expired; renew it, or correct this machine's clock"
    elif error.verify_code == _NOT_YET_VALID:
        what = "is not valid yet; correct this machine's clock"
    elif error.verify_code in _WRONG_NAME:
        what = f"is not valid for {endpoint.host}; connect by a name or address in the certificate"
    else:
        what = (
            f"is not trusted by {access.ca} ({error.verify_message}); give the CA certificate of its "
            "issuer as --etcd-ca"
        )
    return NotAStoreError(f"the certificate of etcd at {endpoint} {what}")


def _bad_tls(error: ssl.SSLError, endpoint: Endpoint, access: EtcdAccess) -> TransportError:
    reason = error.reason or ""
    if "ALERT" in reason and any(
        word in reason for word in ("CERTIFICATE", "UNKNOWN_CA", "HANDSHAKE_FAILURE")
    ):
        if access.cert is None:
            what = "requires a client certificate; give --etcd-cert and --etcd-key"
        else:
            what = (
                f"rejects the client certificate {access.cert}; expected a valid one of an authority "
                "that etcd trusts"
            )
        return NotAStoreError(f"etcd at {endpoint} {what}")
    return _other_answer(b"", endpoint, access)


def _silent(endpoint: Endpoint, timeout_s: float) -> TransportError:
    if _is_c10d(endpoint):
        return NotAStoreError(
            f"{endpoint} is a c10d store, not etcd; remove --rdzv-backend etcd, or give etcd's endpoint"
        )
    return UnreachableError(
        f"{endpoint} accepts connections but did not answer within {timeout_s:g} s (etcd is frozen or "
        "overloaded, or another program listens there)",
        Obstacle.SILENT,
    )


def _other_answer(answer: bytes, endpoint: Endpoint, access: EtcdAccess) -> TransportError:
    if access.tls and _is_plaintext(endpoint):
        return NotAStoreError(
            f"etcd at {endpoint} does not use TLS; remove --etcd-ca, --etcd-cert and --etcd-key, or set "
            "up TLS there"
        )
    if not access.tls and _uses_tls(endpoint):
        return NotAStoreError(f"{endpoint} requires TLS; give the trusted CA certificates as --etcd-ca")
    if not answer and access.tls:
        answer = _read_plaintext(endpoint)
    if not answer:  # one that is just ending, a proxy before one that is not there yet
        return UnreachableError(f"{endpoint} closed the connection without an answer", Obstacle.CLOSED)
    return NotAStoreError(
        f"{endpoint} is not etcd (it answered {answer[:32]!r}); expected etcd's client port, usually 2379"
    )


def _is_c10d(endpoint: Endpoint) -> bool:
    try:
        with connect(endpoint.host, endpoint.port, _SECOND_LOOK_S) as sock:
            return wire.is_store(sock, _SECOND_LOOK_S)
    except (OSError, UnreachableError):
        return False


def _is_plaintext(endpoint: Endpoint) -> bool:
    return _is_etcds(_read_plaintext(endpoint))


def _read_plaintext(endpoint: Endpoint) -> bytes:
    try:
        with connect(endpoint.host, endpoint.port, _SECOND_LOOK_S) as sock:
            sock.settimeout(_SECOND_LOOK_S)
            sock.sendall(_HELLO)
            return _receive(sock)
    except (OSError, UnreachableError):
        return b""


def _uses_tls(endpoint: Endpoint) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent over it
    try:
        with connect(endpoint.host, endpoint.port, _SECOND_LOOK_S) as sock:
            sock.settimeout(_SECOND_LOOK_S)
            with context.wrap_socket(sock, server_hostname=endpoint.host):
                return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except (OSError, UnreachableError):
        return False
