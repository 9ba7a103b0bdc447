"""Connects to a store in TLS, and says which of the two sides has which secret if that fails."""

from __future__ import annotations

import socket
import ssl
import time

from elastic_agent.transport.addresses import connect, set_up_for_messages
from elastic_agent.transport.base import (
    NotAStoreError,
    Obstacle,
    TransportError,
    UnreachableError,
    WrongKeyError,
    silent,
)
from elastic_agent.transport.certificates import Secret, secret_id_in
from elastic_agent.values import Endpoint

from .wire import is_store, probe_store

LOOK_S = 2.0
"""A server that has not answered a client in TLS for so long may be a store without a secret."""

REMEDY = "give every agent the same --secret-file, elastic-agent serve too"


def checked(
    sock: socket.socket, endpoint: Endpoint, timeout_s: float, secret: Secret | None
) -> socket.socket:
    """Check that a store answers, which has the same secret, or none if this agent has none.

    Args:
        sock: connected to the endpoint; it is closed if an error is raised.
        endpoint: as messages name it.
        timeout_s: how long each answer is awaited.
        secret: of this agent; with it, the connection is in TLS.

    Returns:
        The connection to use.

    Raises:
        UnreachableError: no answer in time, or the other end hung up.
        WrongKeyError: the store has another secret, or only one of the two sides has one.
        NotAStoreError: another program answers.
    """
    shown = str(endpoint)
    try:
        if secret is not None:
            sock = _in_tls(sock, endpoint, timeout_s, secret)
        # Another server in TLS has answered already.
        probe_store(sock, timeout_s, shown, provoke=secret is None)
    except ssl.SSLError as error:
        sock.close()
        raise _refused(endpoint, timeout_s, secret, error) from None
    except (UnreachableError, NotAStoreError) as error:
        sock.close()
        if secret is not None or not _is_like_tls(error):
            raise
        raise _needs_secret(endpoint, timeout_s) or error from None
    except OSError as error:  # it broke before the first message
        sock.close()
        raise _closed(endpoint, str(error.strerror or error)) from None
    except BaseException:
        sock.close()
        raise
    return sock


def _in_tls(sock: socket.socket, endpoint: Endpoint, timeout_s: float, secret: Secret) -> ssl.SSLSocket:
    """Shake hands. Raises ssl.SSLError; WrongKeyError: a plain store answers; UnreachableError: no answer in time."""
    try:
        set_up_for_messages(sock)
        secured = secret.client_context.wrap_socket(sock, do_handshake_on_connect=False)
    except ssl.SSLError:
        raise
    except OSError as error:
        raise ssl.SSLEOFError(str(error)) from None  # it was reset meanwhile
    ends_s = time.monotonic() + timeout_s
    wait_s = min(timeout_s, LOOK_S)
    while True:
        secured.settimeout(wait_s)
        try:
            secured.do_handshake()
        except TimeoutError:
            # torch's server waits for more of what it takes for a message.
            problem = _has_no_secret(endpoint, timeout_s, secret)
            wait_s = ends_s - time.monotonic()
            if problem is not None or wait_s <= 0:
                secured.close()
                raise problem or silent(str(endpoint), timeout_s) from None
        except OSError as error:
            secured.close()
            if isinstance(error, ssl.SSLError):
                raise
            raise ssl.SSLEOFError(str(error)) from None  # reset by a server without TLS
        else:
            return secured


def _refused(
    endpoint: Endpoint, timeout_s: float, secret: Secret | None, error: ssl.SSLError
) -> TransportError:
    """Return why the store and this agent, which has the secret, do not accept each other, or what else broke."""
    assert secret is not None
    theirs = _secret_id(endpoint, timeout_s, secret)
    reason = getattr(error, "reason", "") or str(error)  # OpenSSL's name of the error
    is_refusal = isinstance(error, ssl.SSLCertVerificationError) or reason == "TLSV1_ALERT_UNKNOWN_CA"
    if theirs and not (is_refusal and theirs != secret.ids[0]):
        return _closed(endpoint, reason)
    if theirs:
        return WrongKeyError(
            f"the store at {endpoint} has another secret (key id {theirs}) than this agent (key id {secret.ids[0]}); "
            f"{REMEDY}"
        )
    problem = _has_no_secret(endpoint, timeout_s, secret)
    if problem is not None:
        return problem
    if isinstance(error, ssl.SSLEOFError):
        return _closed(endpoint, "no answer to a client in TLS")
    return NotAStoreError(
        f"{endpoint} is used by another program, which is not a store ({reason}); use another port, or stop "
        "that program"
    )


def _has_no_secret(endpoint: Endpoint, timeout_s: float, secret: Secret) -> TransportError | None:
    """Return the error of a store without a secret, if one answers there, or of an endpoint that is not reached."""
    try:
        with connect(endpoint.host, endpoint.port, timeout_s) as plain:
            if not is_store(plain, timeout_s):
                return None
    except UnreachableError as error:  # the host has died
        return error
    return WrongKeyError(
        f"the store at {endpoint} was started without a secret, and this agent has one (key id {secret.ids[0]}); "
        f"{REMEDY}"
    )


def _closed(endpoint: Endpoint, why: str) -> UnreachableError:
    return UnreachableError(f"{endpoint} closed the connection ({why})", Obstacle.CLOSED)


def _is_like_tls(error: TransportError) -> bool:
    """Whether a server that expects TLS may have caused the error of a client that sent a store's messages."""
    return isinstance(error, NotAStoreError) or error.obstacle is Obstacle.CLOSED


def _needs_secret(endpoint: Endpoint, timeout_s: float) -> WrongKeyError | None:
    theirs = _secret_id(endpoint, timeout_s, None)
    if not theirs:
        return None
    return WrongKeyError(
        f"the store at {endpoint} accepts only agents with its secret (key id {theirs}), and this agent has none; "
        "pass the same --secret-file to every agent"
    )


def _secret_id(endpoint: Endpoint, timeout_s: float, secret: Secret | None) -> str:
    """Return the id of the secret of the server, for messages alone; empty: it has none, or does not answer.

    ``secret``: of this agent, which it presents: a host that has it, too, then reports no stranger.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if secret is None else secret.new_client_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with connect(endpoint.host, endpoint.port, timeout_s) as sock:
            sock.settimeout(timeout_s)
            with context.wrap_socket(sock) as looking:
                certificate = looking.getpeercert(binary_form=True)
    except (OSError, UnreachableError):
        return ""
    return (secret_id_in(certificate) or "") if certificate else ""
