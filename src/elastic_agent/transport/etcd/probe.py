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
from elastic_agent.transport.c10d import wire
from elastic_agent.transport.certificates import SERVER_NAME, Secret, secret_id_in
from elastic_agent.values import Endpoint, EtcdAccess

_FRAME_HEADER, _SETTINGS = 9, 4
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0))
"""The preface of an HTTP/2 client, and settings without any parameter."""

_SECOND_LOOK_S = 0.15
"""Once something is wrong: how long to look for what it is. The time-out covers this too."""

_NOT_YET_VALID, _EXPIRED = 9, 10
_WRONG_NAME = (62, 64)
"""OpenSSL's error numbers for a bad certificate; all others mean that no trusted authority issued it."""


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
    """As much as is needed to identify the server; less at the end of the connection."""
    data = b""
    while len(data) < _FRAME_HEADER and (more := stream.recv(64)):
        data += more
    return data


def _is_etcds(answer: bytes) -> bool:
    """Whether it begins as every server of HTTP/2 does."""
    return len(answer) >= _FRAME_HEADER and answer[3] == _SETTINGS


# -- our own certificates -------------------------------------------------------------------------


def _context(access: EtcdAccess, secret: Secret | None) -> ssl.SSLContext | None:
    """TLS with our certificates; None: without TLS.

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
    theirs = secret_id_in(_certificate_at(endpoint) or b"")
    if secret is not None:
        return _other_secret(endpoint, theirs, secret)
    if theirs is not None:
        return _has_secret(endpoint, theirs, "give it in place of --etcd-ca, --etcd-cert and --etcd-key")
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


def _other_secret(endpoint: Endpoint, theirs: str | None, secret: Secret) -> WrongKeyError:
    """The error of a server whose certificate was not made from our secret."""
    if theirs is None:
        return WrongKeyError(
            f"etcd at {endpoint} has a certificate that was not made from a secret, and this agent has one "
            f"(key id {_ids(secret)}): start etcd with {_WRITE_CERTIFICATES}, or give --etcd-ca in place of the "
            "secret (docs/etcd.md)"
        )
    return WrongKeyError(
        f"etcd at {endpoint} has certificates of another secret (key id {theirs}) than this agent "
        f"(key id {_ids(secret)}); give all agents and all members of etcd the same secret (docs/etcd.md)"
    )


def _has_secret(endpoint: Endpoint, theirs: str, remedy: str) -> WrongKeyError:
    return WrongKeyError(
        f"etcd at {endpoint} accepts only agents with its secret (key id {theirs}), and this agent has none; {remedy}"
    )


def _ids(secret: Secret) -> str:
    return ", ".join(secret.ids)


def _bad_tls(
    error: ssl.SSLError, endpoint: Endpoint, access: EtcdAccess, secret: Secret | None
) -> TransportError:
    reason = error.reason or ""
    if "ALERT" in reason and any(
        word in reason for word in ("CERTIFICATE", "UNKNOWN_CA", "HANDSHAKE_FAILURE")
    ):
        if secret is not None:
            return WrongKeyError(
                f"etcd at {endpoint} rejects the certificate of this agent's secret (key id {secret.ids[0]}): start "
                f"etcd with {_WRITE_CERTIFICATES}, ca.pem as --trusted-ca-file (docs/etcd.md)"
            )
        if access.cert is None:
            what = "requires a client certificate; give --etcd-cert and --etcd-key"
        else:
            what = (
                f"rejects the client certificate {access.cert}; expected a valid one of an authority "
                "that etcd trusts"
            )
        return NotAStoreError(f"etcd at {endpoint} {what}")
    return _other_answer(b"", endpoint, access, secret)


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


def _other_answer(
    answer: bytes, endpoint: Endpoint, access: EtcdAccess, secret: Secret | None
) -> TransportError:
    has_tls = secret is not None or access.tls
    if has_tls and _is_plaintext(endpoint):
        return _no_tls(endpoint, secret)
    if not has_tls and (certificate := _certificate_at(endpoint)) is not None:
        theirs = secret_id_in(certificate)
        if theirs is not None:
            return _has_secret(endpoint, theirs, "pass the same --secret-file to every agent")
        return NotAStoreError(f"{endpoint} requires TLS; give the trusted CA certificates as --etcd-ca")
    if not answer and has_tls:
        answer = _read_plaintext(endpoint)
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


def _certificate_at(endpoint: Endpoint) -> bytes | None:
    """The certificate of the server (DER); empty if it is not known, None if the server does not use TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent over it
    try:
        with connect(endpoint.host, endpoint.port, _SECOND_LOOK_S) as sock:
            sock.settimeout(_SECOND_LOOK_S)
            with context.wrap_socket(sock, server_hostname=endpoint.host) as stream:
                return stream.getpeercert(binary_form=True) or b""
    except ssl.SSLError as error:
        return b"" if "ALERT" in (error.reason or "") else None
    except (OSError, UnreachableError):
        return None
