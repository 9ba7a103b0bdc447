"""Connects to a store in TLS, and says which of the two sides has which secret if that fails."""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from elastic_agent.transport.addresses import connect
from elastic_agent.transport.base import (
    NotAStoreError,
    Obstacle,
    TransportError,
    UnreachableError,
    WrongKeyError,
    not_a_store,
    silent,
)
from elastic_agent.transport.blocking_call import run_abandonable
from elastic_agent.transport.certificates import Secret, secret_id_in
from elastic_agent.values import Endpoint

from .stream import ByteStream
from .tcpstore import LOOK_UP_S
from .wire import NONCE_BYTES, greeting, is_store, no_answer, probe_store

T = TypeVar("T")

LOOK_S = 2.0
"""A server that has not answered a client in TLS for so long may be a store without a secret."""

REMEDY = "give every agent the same --secret-file, elastic-agent serve too"


def check_plain(sock: socket.socket, endpoint: Endpoint, timeout_s: float) -> None:
    """Check, by a blocking socket, that a store answers which has no secret.

    Args:
        sock: connected to the endpoint.
        endpoint: as messages name it.
        timeout_s: how long each answer is awaited.

    Raises:
        UnreachableError: no answer in time, or the other end hung up.
        WrongKeyError: the store has a secret.
        NotAStoreError: another program answers.
    """
    try:
        probe_store(sock, timeout_s, str(endpoint))
    except (UnreachableError, NotAStoreError) as error:
        if not _is_like_tls(error):
            raise
        raise _needs_secret(endpoint, timeout_s) or error from None
    except OSError as error:  # it broke before the first message
        raise _closed(endpoint, str(error.strerror or error)) from None


async def secured(sock: socket.socket, endpoint: Endpoint, timeout_s: float, secret: Secret) -> ByteStream:
    """Shake hands in TLS, and check that a store answers which has the same secret.

    Args:
        sock: connected to the endpoint; it becomes the stream's.
        endpoint: as messages name it.
        timeout_s: how long each answer is awaited.
        secret: of this agent.

    Returns:
        The connection to use.

    Raises:
        UnreachableError: no answer in time, or the other end hung up.
        WrongKeyError: the store has another secret or none.
        NotAStoreError: another program answers.
    """
    try:
        stream = await _in_tls(sock, endpoint, timeout_s, secret)
        try:
            await _greet(stream, endpoint, timeout_s)
        except BaseException:
            stream.abort()
            raise
    except ssl.SSLError as error:
        raise await diagnosed(partial(_refused, endpoint, timeout_s, secret, error), timeout_s) from None
    return stream


async def diagnosed(look: Callable[[], T], timeout_s: float) -> T:
    """Return what is found by a few blocking connections, each step of which takes ``timeout_s`` at most."""
    return await run_abandonable(look, 6 * timeout_s + LOOK_UP_S)


async def _in_tls(sock: socket.socket, endpoint: Endpoint, timeout_s: float, secret: Secret) -> ByteStream:
    """Shake hands. Raises ssl.SSLError; WrongKeyError: a plain store answers; UnreachableError: no answer in time."""
    ends_s = time.monotonic() + timeout_s
    handshake = asyncio.create_task(ByteStream.over(sock, secret.client_context))
    try:
        await asyncio.wait([handshake], timeout=min(timeout_s, LOOK_S))
        if not handshake.done():
            # torch's server waits for more of what it takes for a message.
            problem = await diagnosed(partial(_has_no_secret, endpoint, timeout_s, secret), timeout_s)
            await asyncio.wait([handshake], timeout=0 if problem else max(0.0, ends_s - time.monotonic()))
            if not handshake.done():
                raise problem or silent(str(endpoint), timeout_s)
        return handshake.result()
    except ssl.SSLError:
        raise
    except OSError as error:
        raise ssl.SSLEOFError(str(error)) from None  # reset by a server without TLS
    except BaseException:
        handshake.cancel()
        handshake.add_done_callback(_abort)
        raise


def _abort(handshake: asyncio.Task[ByteStream]) -> None:
    """Close what nobody waits for any more."""
    if not handshake.cancelled() and handshake.exception() is None:
        handshake.result().abort()


async def _greet(stream: ByteStream, endpoint: Endpoint, timeout_s: float) -> None:
    """Check that a store answers, as :func:`probe_store` does; another server in TLS has answered already."""
    nonce, shown = secrets.token_bytes(NONCE_BYTES), str(endpoint)
    stream.write(greeting(nonce))
    try:
        answer = await stream.read(len(nonce), stream.now_s() + timeout_s)
    except TimeoutError:
        raise silent(shown, timeout_s) from None
    except ssl.SSLError:
        raise
    except OSError:
        answer = stream.received
    if not answer:
        raise no_answer(shown)
    if answer != nonce:
        raise not_a_store(shown, answer)


def _refused(endpoint: Endpoint, timeout_s: float, secret: Secret, error: ssl.SSLError) -> TransportError:
    """Return why the store and this agent do not accept each other, or what else broke."""
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
