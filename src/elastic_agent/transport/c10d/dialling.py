"""Connects to a c10d store, with a secret in TLS, for each use; and the run id that the agents of a job agree on.

If the two sides do not have the same secret, the error says which side has which.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl

from elastic_agent.transport.addresses import connect, local_address_towards
from elastic_agent.transport.base import (
    NotAStoreError,
    Obstacle,
    OtherVersionError,
    TransportError,
    UnreachableError,
    WrongKeyError,
)
from elastic_agent.transport.blocking_call import run_abandonable
from elastic_agent.transport.certificates import Secret, certificate_at, secret_id_in
from elastic_agent.transport.coordinator_records import ReportRecords
from elastic_agent.transport.keys import CLEARING, JOBS, RELEASED, STORE_ID, name_in
from elastic_agent.transport.record_reader import log_invalid
from elastic_agent.transport.records import NodeRecords
from elastic_agent.values import Endpoint

from .client import TCPStoreClient
from .table import CALL_TIMEOUT_S, ROOT, C10dTable

LOOK_UP_S = 30.0
"""The time that looking up a name may take: longer than the resolver with its defaults."""

BIRTH_S = 2.0
"""A new store's id is written within this time of its port being open."""

_OTHER_ID = re.compile(rf"elastic-agent/\d+/{STORE_ID}")

REMEDY = "give every agent the same --secret-file, elastic-agent serve too"


async def reach(
    endpoint: Endpoint, timeout_s: float, secret: Secret | None = None, call_timeout_s: float | None = None
) -> TCPStoreClient:
    """Connect to a TCPStore server, which has answered then.

    Args:
        endpoint: of the store.
        timeout_s: how long each step may take: the connection, the handshake in TLS, the first answer.
        secret: what the two sides prove to each other, in TLS; None: nothing.
        call_timeout_s: how long each call may take; None: :data:`.table.CALL_TIMEOUT_S`.

    Raises:
        UnreachableError: nothing listens there, or what does has not answered in time or hung up.
        NotAStoreError: it answers otherwise than a store.
        ssl.SSLError: it does not speak TLS, or one side does not accept the other.
    """

    def connected() -> tuple[socket.socket, ssl.SSLContext | None]:
        sock = connect(endpoint.host, endpoint.port, timeout_s)
        return sock, None if secret is None else secret.client_context  # makes a certificate, the first time

    sock, context = await run_abandonable(
        connected, 2 * timeout_s + LOOK_UP_S, too_late=lambda late: late[0].close()
    )
    return await TCPStoreClient.over(
        sock, str(endpoint), timeout_s, CALL_TIMEOUT_S if call_timeout_s is None else call_timeout_s, context
    )


async def check_store(endpoint: Endpoint, timeout_s: float) -> None:
    """Check that a store without a secret answers; raises TransportError, whose one line names the endpoint."""
    try:
        (await reach(endpoint, timeout_s)).close()
    except UnreachableError as error:
        if error.obstacle in (Obstacle.CLOSED, Obstacle.SILENT):
            raise
        raise TransportError(f"{endpoint}: {error}") from None


async def open_table(
    endpoint: Endpoint, timeout_s: float, secret: Secret | None = None, root: str = ROOT
) -> C10dTable:
    """Connect to the store of runs at the endpoint.

    With ``secret``, the connection is in TLS. ``root``: of the keys of the table.

    Raises:
        UnreachableError: nothing answers, or not in time.
        WrongKeyError: the store has another secret, or only one of the two sides has one.
        NotAStoreError: what answers is not a store of elastic-agent.
        OtherVersionError: another version of elastic-agent created it.
        StoreLostError: it broke off in between.
    """
    try:
        client = await reach(endpoint, timeout_s, secret)
    except (ssl.SSLError, NotAStoreError, UnreachableError) as error:
        if isinstance(error, UnreachableError) and error.obstacle not in (Obstacle.CLOSED, Obstacle.SILENT):
            raise
        raise await _explained(error, endpoint, timeout_s, secret) from None
    try:
        local_address = local_address_towards(endpoint.host, client.own_address)
        return C10dTable(client, local_address, await _store_id(client, endpoint), root)
    except BaseException:
        client.close()
        raise


async def _store_id(store: TCPStoreClient, endpoint: Endpoint) -> str:
    """Return the id that our hosts write into their stores when they begin."""
    key = ROOT + STORE_ID
    (data,) = await store.get([key])
    if not data and await store.wait(key, BIRTH_S):
        (data,) = await store.get([key])
    name = name_in(data)
    if name is not None:
        return name
    if any(_OTHER_ID.fullmatch(found) for found in await store.list_keys()):
        raise OtherVersionError(
            f"the store at {endpoint} was created by another version of elastic-agent",
            remedy="install the same version on all machines, elastic-agent serve included",
        )
    raise NotAStoreError(
        f"the store at {endpoint} was not created by elastic-agent (is a torchrun job using the "
        "port?); use another port, or stop that job"
    )


async def _explained(
    error: ssl.SSLError | TransportError, endpoint: Endpoint, timeout_s: float, secret: Secret | None
) -> TransportError:
    """Return what to raise for this error: the two sides may have different secrets."""
    theirs = None
    if not isinstance(error, TransportError) or error.obstacle is not Obstacle.SILENT:
        certificate = await run_abandonable(
            lambda: certificate_at(endpoint, timeout_s, secret), 2 * timeout_s + LOOK_UP_S
        )
        theirs = secret_id_in(certificate)
    if theirs is not None and secret is None:
        return WrongKeyError(
            f"the store at {endpoint} accepts only agents with its secret (key id {theirs}), and this agent has none; "
            "pass the same --secret-file to every agent"
        )
    reason = str(getattr(error, "reason", "") or error)  # OpenSSL's name of the error
    is_refusal = isinstance(error, ssl.SSLCertVerificationError) or reason == "TLSV1_ALERT_UNKNOWN_CA"
    if theirs is not None and secret is not None and is_refusal and theirs != secret.ids[0]:
        return WrongKeyError(
            f"the store at {endpoint} has another secret (key id {theirs}) than this agent "
            f"(key id {secret.ids[0]}); {REMEDY}"
        )
    if theirs is None and secret is not None and await _answers_without_tls(endpoint, timeout_s):
        return WrongKeyError(
            f"the store at {endpoint} was started without a secret, and this agent has one "
            f"(key id {secret.ids[0]}); {REMEDY}"
        )
    if isinstance(error, TransportError):
        return error
    if theirs is not None or isinstance(error, ssl.SSLEOFError):
        return UnreachableError(f"{endpoint} closed the connection ({reason})", Obstacle.CLOSED)
    return NotAStoreError(
        f"{endpoint} is used by another program, which is not a store ({reason}); use another port, or stop "
        "that program"
    )


async def _answers_without_tls(endpoint: Endpoint, timeout_s: float) -> bool:
    try:
        await check_store(endpoint, timeout_s)
    except TransportError:
        return False
    return True


# -- what a connection is for --------------------------------------------------------------------


async def agree_run_id(
    endpoint: Endpoint, fingerprint: str, proposal: str, timeout_s: float, secret: Secret | None = None
) -> str:
    """Return the run id of this job at the endpoint: the one agreed before, else ``proposal``."""
    key = JOBS + fingerprint
    with contextlib.closing(await open_table(endpoint, timeout_s, secret)) as table:
        stored = await table.swap(key, None, proposal.encode())
        while (name := name_in(stored or b"")) is None:
            if stored is None or stored == CLEARING:
                expected = None
            else:
                expected = stored
                if not stored.startswith(RELEASED):
                    log_invalid(f"{table.root}{key}: {stored[:64]!r} is not a run id")
            stored = await table.swap(key, expected, proposal.encode())
    return name


async def release_run_id(
    endpoint: Endpoint, fingerprint: str, run_id: str, timeout_s: float, secret: Secret | None = None
) -> None:
    """Have the next job with this fingerprint be another run: that one is over."""
    with contextlib.closing(await open_table(endpoint, timeout_s, secret)) as table:
        await table.swap(JOBS + fingerprint, run_id.encode(), RELEASED + run_id.encode())


async def dial(
    endpoint: Endpoint, run_id: str, timeout_s: float, secret: Secret | None = None
) -> NodeRecords:
    """Connect a node to a run at the endpoint; other arguments and errors as for :func:`open_table`."""
    table = await open_table(endpoint, timeout_s, secret)
    try:
        return await NodeRecords.open(table, run_id)
    except BaseException:
        table.close()
        raise


async def dial_reports(
    endpoint: Endpoint, run_id: str, timeout_s: float, secret: Secret | None = None
) -> ReportRecords:
    """Connect to the reports of a run at the endpoint; other arguments and errors as for :func:`open_table`."""
    return ReportRecords(await open_table(endpoint, timeout_s, secret), run_id)
