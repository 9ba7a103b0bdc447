"""Connections to a c10d store for each use, and the run id that the agents of a job agree on there."""

from __future__ import annotations

import os
import re
import socket
from functools import partial

from elastic_agent.transport.addresses import connect, is_local, local_address_towards, resolve
from elastic_agent.transport.base import NotAStoreError, Obstacle, OtherVersionError, UnreachableError
from elastic_agent.transport.blocking_call import run_abandonable
from elastic_agent.transport.certificates import Secret
from elastic_agent.transport.keys import CLEARING, JOBS, RELEASED, STORE_ID, name_in
from elastic_agent.transport.port_holder import holder_of
from elastic_agent.transport.record_reader import log_invalid
from elastic_agent.transport.records import NodeRecords
from elastic_agent.transport.report_records import ReportRecords
from elastic_agent.values import Endpoint

from .secured import check_plain, diagnosed, secured
from .table import CALL_TIMEOUT_S, ROOT, C10dTable
from .tcpstore import LOOK_UP_S, TCPStoreClient

BIRTH_S = 2.0
"""A new store's id is written within this time of its port being open."""

_OTHER_ID = re.compile(rf"elastic-agent/\d+/{STORE_ID}")


async def open_table(
    endpoint: Endpoint, timeout_s: float, secret: Secret | None = None, root: str = ROOT
) -> C10dTable:
    """Connect to the store at the endpoint.

    With ``secret``, the connection is in TLS. ``root``: of the keys of the table.

    Raises:
        UnreachableError: nothing answers, or not in time.
        WrongKeyError: the store has another secret, or only one of the two sides has one.
        NotAStoreError: what answers is not a store of elastic-agent.
        OtherVersionError: another version of elastic-agent created it.
        StoreLostError: it broke off in between.
    """
    shown = str(endpoint)
    sock, local_address = await run_abandonable(
        partial(_reached, endpoint, timeout_s, secret),
        6 * timeout_s + LOOK_UP_S,
        too_late=lambda late: late[0].close(),
    )
    if secret is None:
        client = await TCPStoreClient.over(sock, shown, CALL_TIMEOUT_S)
    else:
        try:
            client = TCPStoreClient(await secured(sock, endpoint, timeout_s, secret), shown, CALL_TIMEOUT_S)
        except UnreachableError as error:
            raise await diagnosed(partial(_silent, endpoint, timeout_s, error), timeout_s) from None
    try:
        return C10dTable(client, local_address, await _store_id(client, endpoint), root)
    except BaseException:
        client.close()
        raise


def _reached(endpoint: Endpoint, timeout_s: float, secret: Secret | None) -> tuple[socket.socket, str]:
    """Return a connection, and the address of this machine on it; without a secret, a store has answered."""
    try:
        sock = connect(endpoint.host, endpoint.port, timeout_s)
    except UnreachableError as error:  # the queue of a program that takes no connections from it may be full
        what = f"accepts no more connections (no answer within {timeout_s:g} s)"
        raise _named(endpoint, what, error) from None
    try:
        if secret is None:
            check_plain(sock, endpoint, timeout_s)
        else:
            _ = secret.client_context  # makes a certificate, the first time
        return sock, local_address_towards(endpoint.host, sock)
    except UnreachableError as error:
        sock.close()
        raise _silent(endpoint, timeout_s, error) from None
    except BaseException:
        sock.close()
        raise


def _silent(endpoint: Endpoint, timeout_s: float, error: UnreachableError) -> UnreachableError:
    return _named(endpoint, f"accepts connections but did not answer within {timeout_s:g} s", error)


def _named(endpoint: Endpoint, what: str, error: UnreachableError) -> UnreachableError:
    """The error to raise instead, if a process of this machine has the port and does not answer: one that names it."""
    is_silence = error.obstacle in (Obstacle.NO_ANSWER, Obstacle.SILENT)
    holder = holder_here(endpoint) if is_silence else ""
    if not holder:
        return error
    return UnreachableError(
        f"{endpoint} {what}: {holder} of this machine has the port (if that serves the store of a run, it is "
        "frozen or overloaded)",
        Obstacle.SILENT,
    )


def holder_here(endpoint: Endpoint) -> str:
    """The other process of this machine that has the endpoint's port, in words; empty: none, or it is not known."""
    try:
        holder = holder_of(endpoint.port) if is_local(resolve(endpoint.host)) else ""
    except (UnreachableError, OSError):
        return ""
    return "" if holder.endswith(f"(pid {os.getpid()})") else holder


async def _store_id(store: TCPStoreClient, endpoint: Endpoint) -> str:
    """Return the id that our hosts write into their stores when they are born."""
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


async def agree_run_id(
    endpoint: Endpoint, fingerprint: str, proposal: str, timeout_s: float, secret: Secret | None = None
) -> str:
    """Return the run id of this job at the endpoint: the one agreed before, else ``proposal``."""
    table = await open_table(endpoint, timeout_s, secret)
    key = JOBS + fingerprint
    stored = await table.swap(key, None, proposal.encode())
    while (name := name_in(stored or b"")) is None:
        if stored is None or stored == CLEARING:
            expected = None
        else:
            expected = stored
            if not stored.startswith(RELEASED):
                log_invalid(f"{table.root}{key}: {stored[:64]!r} is not a run id")
        stored = await table.swap(key, expected, proposal.encode())
    table.close()
    return name


async def release_run_id(
    endpoint: Endpoint, fingerprint: str, run_id: str, timeout_s: float, secret: Secret | None = None
) -> None:
    """That run is over: the next job with this fingerprint is another run."""
    table = await open_table(endpoint, timeout_s, secret)
    await table.swap(JOBS + fingerprint, run_id.encode(), RELEASED + run_id.encode())
    table.close()


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
