"""Connects to a TCPStore server, with a secret in TLS, and says which side has which secret if that fails."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import ssl

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
from elastic_agent.transport.certificates import Secret, certificate_at, secret_id_in
from elastic_agent.values import Endpoint

from .stream import ByteStream
from .wire import NONCE_BYTES, PROVOCATION, greeting

LOOK_UP_S = 30.0
"""How long looking up a name may take: longer than the resolver with its defaults."""

LOOK_S = 2.0
"""A server that has not answered a client in TLS for so long may be a store without a secret."""

PROVOKED_S = 0.5
"""How long another server may take to answer :data:`~.wire.PROVOCATION`."""

REMEDY = "give every agent the same --secret-file, elastic-agent serve too"


async def open_stream(endpoint: Endpoint, timeout_s: float, secret: Secret | None = None) -> ByteStream:
    """Connect to the store of a run; arguments as for :func:`reach`.

    Raises:
        UnreachableError: nothing listens there, or what does has not answered in time or hung up.
        WrongKeyError: the store has another secret, or only one of the two sides has one.
        NotAStoreError: another program answers.
    """
    try:
        return await reach(endpoint, timeout_s, secret)
    except WrongKeyError:
        raise
    except (ssl.SSLError, NotAStoreError) as error:
        problem: ssl.SSLError | TransportError = error
    except UnreachableError as error:
        if error.obstacle is not Obstacle.CLOSED:
            raise
        problem = error
    raise await _explained(problem, endpoint, timeout_s, secret)


async def reach(endpoint: Endpoint, timeout_s: float, secret: Secret | None = None) -> ByteStream:
    """Connect to a store, which has answered then.

    Args:
        endpoint: of the store.
        timeout_s: how long each step may take: the connection, the handshake in TLS, the first answer.
        secret: what the two sides prove to each other, in TLS; None: nothing.

    Raises:
        UnreachableError: nothing listens there, or what does has not answered in time or hung up.
        WrongKeyError: it answers without TLS only.
        NotAStoreError: it answers otherwise than a store.
        ssl.SSLError: it does not speak TLS, or one side does not accept the other.
    """

    def connected() -> tuple[socket.socket, ssl.SSLContext | None]:
        sock = connect(endpoint.host, endpoint.port, timeout_s)
        return sock, None if secret is None else secret.client_context  # makes a certificate, the first time

    sock, context = await run_abandonable(
        connected, 2 * timeout_s + LOOK_UP_S, too_late=lambda late: late[0].close()
    )
    try:
        if secret is None or context is None:
            stream = await ByteStream.over(sock)
        else:
            stream = await _in_tls(sock, context, endpoint, timeout_s, secret)
    except ssl.SSLError:
        raise
    except OSError as error:
        raise _closed(endpoint, str(error.strerror or error)) from None
    try:
        await _greet(stream, str(endpoint), timeout_s)
    except BaseException:
        stream.abort()
        raise
    return stream


async def check_store(endpoint: Endpoint, timeout_s: float) -> None:
    """Check that a store without a secret answers; raises TransportError, whose one line names the endpoint."""
    try:
        (await reach(endpoint, timeout_s)).abort()
    except UnreachableError as error:
        raise error if _was_connected(error) else TransportError(f"{endpoint}: {error}") from None


async def _in_tls(
    sock: socket.socket, context: ssl.SSLContext, endpoint: Endpoint, timeout_s: float, secret: Secret
) -> ByteStream:
    """Shake hands; if that takes long, look beside it whether the store answers without TLS.

    Whichever succeeds first decides: a host that was stopped for a while answers both connections when it goes on.

    Raises:
        UnreachableError: there is no answer in time.
        WrongKeyError: the store answers without TLS.
        OSError: the handshake failed.
    """
    now_s = asyncio.get_running_loop().time
    ends_s = now_s() + timeout_s
    problem: TransportError = silent(str(endpoint), timeout_s)

    async def look() -> None:
        nonlocal problem
        await asyncio.sleep(min(timeout_s, LOOK_S))
        try:
            await check_store(endpoint, timeout_s)
        except TransportError as error:
            # Then the server runs (again), and may answer the handshake next.
            has_answered = isinstance(error, NotAStoreError) or error.obstacle is Obstacle.CLOSED
            patience.reschedule(max(ends_s, now_s() + (timeout_s if has_answered else 0.0)))
        else:
            problem = _has_no_secret(endpoint, secret)
            patience.reschedule(now_s())

    looking = asyncio.create_task(look())
    try:
        async with asyncio.timeout(4 * timeout_s) as patience:
            return await ByteStream.over(sock, context)
    except TimeoutError:
        raise problem from None
    finally:
        looking.cancel()
        await asyncio.wait([looking])


async def _greet(stream: ByteStream, shown: str, timeout_s: float) -> None:
    """Check that the other end answers as a TCPStore does; errors as for :func:`reach`."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    stream.write(greeting(nonce))
    try:
        answer = await stream.read(len(nonce), stream.now_s() + timeout_s)
    except TimeoutError:
        stream.write(PROVOCATION)
        with contextlib.suppress(OSError):
            await stream.more(stream.now_s() + PROVOKED_S)
        answer = stream.received
        if not answer or answer.startswith(nonce):  # a store that was only late: the next attempt will do
            raise silent(shown, timeout_s) from None
    except ssl.SSLError:
        raise
    except OSError:
        answer = stream.received
    if not answer:  # a host that dies while it accepts, a proxy before one that is not there yet
        raise UnreachableError(f"{shown} closed the connection without an answer", Obstacle.CLOSED)
    if answer != nonce:
        raise not_a_store(shown, answer)


async def _explained(
    error: ssl.SSLError | TransportError, endpoint: Endpoint, timeout_s: float, secret: Secret | None
) -> TransportError:
    """Return what to raise for this error: the two sides may have different secrets."""
    certificate = await run_abandonable(
        lambda: certificate_at(endpoint, timeout_s, secret), 2 * timeout_s + LOOK_UP_S
    )
    theirs = secret_id_in(certificate or b"") or ""
    if theirs and secret is None:
        return WrongKeyError(
            f"the store at {endpoint} accepts only agents with its secret (key id {theirs}), and this agent has none; "
            "pass the same --secret-file to every agent"
        )
    reason = str(getattr(error, "reason", "") or error)  # OpenSSL's name of the error
    is_refusal = isinstance(error, ssl.SSLCertVerificationError) or reason == "TLSV1_ALERT_UNKNOWN_CA"
    if theirs and secret is not None:
        if not is_refusal or theirs == secret.ids[0]:
            return _closed(endpoint, reason)
        return WrongKeyError(
            f"the store at {endpoint} has another secret (key id {theirs}) than this agent "
            f"(key id {secret.ids[0]}); {REMEDY}"
        )
    if secret is not None and await _answers_without_tls(endpoint, timeout_s):
        return _has_no_secret(endpoint, secret)
    if isinstance(error, TransportError):
        return error
    if isinstance(error, ssl.SSLEOFError):
        return _closed(endpoint, "no answer to a client in TLS")
    return NotAStoreError(
        f"{endpoint} is used by another program, which is not a store ({reason}); use another port, or stop "
        "that program"
    )


def _has_no_secret(endpoint: Endpoint, secret: Secret) -> WrongKeyError:
    return WrongKeyError(
        f"the store at {endpoint} was started without a secret, and this agent has one (key id {secret.ids[0]}); "
        f"{REMEDY}"
    )


async def _answers_without_tls(endpoint: Endpoint, timeout_s: float) -> bool:
    try:
        await check_store(endpoint, timeout_s)
    except TransportError:
        return False
    return True


def _was_connected(error: UnreachableError) -> bool:
    return error.obstacle in (Obstacle.CLOSED, Obstacle.SILENT)


def _closed(endpoint: Endpoint, why: str) -> UnreachableError:
    return UnreachableError(f"{endpoint} closed the connection ({why})", Obstacle.CLOSED)
