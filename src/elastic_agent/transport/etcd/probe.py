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
from elastic_agent.transport.base import (
    NotAStoreError,
    Obstacle,
    TransportError,
    UnreachableError,
    WrongKeyError,
)
from elastic_agent.transport.certificates import SERVER_NAME, Secret, certificate_at, secret_id_in
from elastic_agent.values import Endpoint, EtcdAccess

_FRAME_HEADER, _SETTINGS = 9, 4
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0))
"""The preface of an HTTP/2 client, and settings without any parameter."""

_SECOND_LOOK_S = 0.15
"""Once something is wrong: how long to look for what it is. The time-out covers this too."""

_REFUSALS = ("CERTIFICATE", "UNKNOWN_CA", "HANDSHAKE_FAILURE")
"""Words in OpenSSL's names of the alerts of a server that refuses a client's certificate."""

_WRITE_CERTIFICATES = "the certificates that `elastic-agent secret --certificates DIR FILE` writes"


def probe_server(
    sock: socket.socket, endpoint: Endpoint, access: EtcdAccess, secret: Secret | None, timeout_s: float
) -> None:
    """Return if something that may be etcd is at the other end of the new connection ``sock``, and grants access.

    Raises:
        UnreachableError: it does not answer in time, or closes the connection: another attempt may succeed.
        WrongKeyError: it has another secret, or only one of the two has one.
        NotAStoreError: it never will grant access.
    """
    sock.settimeout(max(timeout_s - _SECOND_LOOK_S, timeout_s / 2))
    context = _context(access, secret)
    stream = sock
    try:
        if context is not None:
            name = endpoint.host if secret is None else SERVER_NAME
            stream = context.wrap_socket(sock, server_hostname=name)
        stream.sendall(_HELLO)
        answer = _receive(stream)
    except TimeoutError:
        raise _silent(endpoint, timeout_s) from None
    except ssl.SSLCertVerificationError as error:
        raise _bad_certificate(error, endpoint, access, secret) from None
    except ssl.SSLError as error:
        raise _bad_tls(error, endpoint, access, secret) from None
    except OSError:
        answer = b""
    finally:
        if stream is not sock:
            stream.close()
    if not _is_etcds(answer):
        raise _other_answer(answer, endpoint, access, secret)


def _receive(stream: socket.socket) -> bytes:
    """Return as much as is needed to identify the server; less at the end of the connection."""
    data = b""
    while len(data) < _FRAME_HEADER and (more := stream.recv(64)):
        data += more
    return data


def _is_etcds(answer: bytes) -> bool:
    """Return whether it begins as every server of HTTP/2 does."""
    return len(answer) >= _FRAME_HEADER and answer[3] == _SETTINGS


# -- our own certificates -------------------------------------------------------------------------


def _context(access: EtcdAccess, secret: Secret | None) -> ssl.SSLContext | None:
    """Return the TLS context with our certificates; None: without TLS.

    Raises:
        NotAStoreError: a file is not what it should be.
    """
    if secret is not None:
        context = secret.new_client_context()
        context.set_alpn_protocols(["h2"])
        return context
    return _configured_context(access) if access.tls else None


def _configured_context(access: EtcdAccess) -> ssl.SSLContext:
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
    error: ssl.SSLCertVerificationError, endpoint: Endpoint, access: EtcdAccess, secret: Secret | None
) -> NotAStoreError:
    theirs = secret_id_in(certificate_at(endpoint, _SECOND_LOOK_S) or b"")
    if secret is None and theirs is not None:
        return _has_secret(endpoint, theirs)
    if secret is None:
        return NotAStoreError(
            f"the certificate of etcd at {endpoint} is not accepted: {error.verify_message.rstrip('.')}; expected one "
            f"that names {endpoint.host}, is valid by this machine's clock, and is issued by --etcd-ca {access.ca}"
        )
    shown = "has certificates that were not made from a secret"
    if theirs is not None:
        shown = f"has certificates of another secret (key id {theirs})"
    return WrongKeyError(
        f"etcd at {endpoint} {shown}, and this agent has a secret (key id {_ids(secret)}): give all "
        "agents and all members of etcd the same secret, or the agents --etcd-ca in place of theirs (docs/etcd.md)"
    )


def _has_secret(endpoint: Endpoint, theirs: str) -> WrongKeyError:
    return WrongKeyError(
        f"etcd at {endpoint} accepts only agents with its secret (key id {theirs}), and this agent has none; pass the "
        "same --secret-file to every agent, in place of --etcd-ca, --etcd-cert and --etcd-key"
    )


def _ids(secret: Secret) -> str:
    return ", ".join(secret.ids)


def _bad_tls(
    error: ssl.SSLError, endpoint: Endpoint, access: EtcdAccess, secret: Secret | None
) -> TransportError:
    reason = error.reason or ""
    if "ALERT" not in reason or not any(word in reason for word in _REFUSALS):
        return _other_answer(b"", endpoint, access, secret)
    if secret is not None:
        return WrongKeyError(
            f"etcd at {endpoint} rejects the certificate of this agent's secret (key id {secret.ids[0]}): start "
            f"etcd with {_WRITE_CERTIFICATES}, ca.pem as --trusted-ca-file (docs/etcd.md)"
        )
    return NotAStoreError(
        f"etcd at {endpoint} requires a valid client certificate of an authority that it trusts, and got "
        f"{access.cert or 'none'}; give --etcd-cert and --etcd-key"
    )


def _silent(endpoint: Endpoint, timeout_s: float) -> UnreachableError:
    return UnreachableError(
        f"{endpoint} accepts connections but did not answer within {timeout_s:g} s (etcd is frozen or "
        "overloaded, or another program listens there, perhaps a c10d store, which needs --rdzv-backend c10d)",
        Obstacle.SILENT,
    )


def _other_answer(
    answer: bytes, endpoint: Endpoint, access: EtcdAccess, secret: Secret | None
) -> TransportError:
    if secret is not None or access.tls:
        answer = answer or _read_plaintext(endpoint)
        if _is_etcds(answer):
            return _no_tls(endpoint, secret)
    elif (certificate := certificate_at(endpoint, _SECOND_LOOK_S)) is not None:
        theirs = secret_id_in(certificate)
        if theirs is not None:
            return _has_secret(endpoint, theirs)
        return NotAStoreError(f"{endpoint} requires TLS; give the trusted CA certificates as --etcd-ca")
    if not answer:  # one that is just ending, a proxy before one that is not there yet
        return UnreachableError(f"{endpoint} closed the connection without an answer", Obstacle.CLOSED)
    return NotAStoreError(
        f"{endpoint} is not etcd (it answered {answer[:32]!r}); expected etcd's client port, usually 2379"
    )


def _no_tls(endpoint: Endpoint, secret: Secret | None) -> NotAStoreError:
    if secret is not None:
        return WrongKeyError(
            f"etcd at {endpoint} does not use TLS, and this agent has a secret (key id {_ids(secret)}): start etcd "
            f"with {_WRITE_CERTIFICATES} (docs/etcd.md)"
        )
    return NotAStoreError(
        f"etcd at {endpoint} does not use TLS; remove --etcd-ca, --etcd-cert and --etcd-key, or set up TLS there"
    )


def _read_plaintext(endpoint: Endpoint) -> bytes:
    try:
        with connect(endpoint.host, endpoint.port, _SECOND_LOOK_S) as sock:
            sock.settimeout(_SECOND_LOOK_S)
            sock.sendall(_HELLO)
            return _receive(sock)
    except (OSError, UnreachableError):
        return b""
